"""Typeset the formulas of docstrings: from plain text to TeX, and from TeX to MathML without a network."""

import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml

GREEK = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "eta", "theta", "kappa", "lambda", "mu", "nu", "pi", "rho",
    "sigma", "tau", "phi", "omega", "Delta",
))  # fmt: skip
FUNCTIONS = frozenset(("log", "exp", "max", "min", "cos"))
NAMES = {
    "lam": r"\lambda", "eps": r"\epsilon", "sum": r"\sum", "grad": r"\nabla", "in": r"\in", "xbar": r"\bar{x}",
    "ybar": r"\bar{y}", "dtheta": r"d\theta", "dL": "dL",
}  # fmt: skip
SIGNS = {
    "<-": r"\leftarrow ", "->": r"\rightarrow ", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne ", "||": r"\Vert ",
    "~": r"\sim ", "*": r"\cdot ", "{": r"\{", "}": r"\}",
}  # fmt: skip
# Words of sentences, and a quotation mark: a cell that has one is a comment.
ENGLISH = re.compile(
    r"\b(of|or|if|else|the|over|for|with|at|then|as|is|are|has|after|from|onto)\b|\""
)
_TOKEN = re.compile(r"<-|->|<=|>=|!=|\|\||cross-entropy|[A-Za-z]+\d?|\d+(?:\.\d+)?|\s+|.")
# An index or a power: in brackets, a name, or a signed number; c_i+ has both.
_ATTACHED = re.compile(
    r"([_^])(\{[^{}]*\}|(?<=\^)\([^()]*\)|l2r|-?[A-Za-z]+\d?|-?\d+)(\+(?=[ ,)]|$))?"
)
_ACCENT = re.compile(r"([A-Za-z])(~|\^)(?![A-Za-z0-9({-])")
_REWRITES = (
    (re.compile(rf"\^({'|'.join(GREEK)})_([a-z])\b"), r"^{\1_\2}"),  # rho^tau_i
    (re.compile(r"\b([a-z])([+-])_"), r"\1^{\2}_"),  # s+_j
    (re.compile(r"_([a-z])\^(?![A-Za-z0-9({-])"), r"_{\1^}"),  # c_y^
    (re.compile(r"_([a-z]),([a-z]{2})\b"), r"_{\1,\2}"),  # P_i,jl
)


def typeset(line: str, write_comment: Callable[[str], str]) -> str | None:
    """Return a line of formulas and comments, which wide gaps separate, as TeX.

    Return None for a line without formulas, and if the TeX cannot become MathML.

    write_comment: function that changes the signs in a comment.
    """
    cells = []
    for cell in re.split(r" {2,}", line.strip()):
        if _is_comment(cell):
            escaped = re.sub(r"([{}\\$#%&])", r"\\\1", write_comment(cell))
            cells.append(rf"\text{{{escaped}}}")
        else:
            cells.append(to_tex(cell))
    if all(cell.startswith(r"\text") for cell in cells):
        return None
    tex = r" \quad ".join(cells)
    try:
        tex2mathml(tex, as_block=True)
    except MathError:
        return None
    return tex


def _is_comment(cell: str) -> bool:
    if ENGLISH.search(cell) or re.search(r"[A-Za-z]{4,}[_=][a-z]{4,}", cell):
        return True
    if re.fullmatch(r"[A-Za-z-]{2,}:?", cell):
        return cell not in GREEK
    words = r"(?<![A-Za-z_^])([A-Za-z'-]{2,})[ ,]+(?=([A-Za-z'-]{2,})(?![A-Za-z_(<]))"
    known = {*GREEK, *FUNCTIONS, *NAMES} - {"in"}
    pairs = re.findall(words, cell)
    return any(first not in known and second not in {*known, "in", "CE"} for first, second in pairs)


def to_tex(text: str) -> str:
    """Return a formula such as "theta <- theta - eta_t grad F(theta)" as TeX."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    parts: list[str] = []
    place = 0
    while place < len(text):
        accent, attached = _ACCENT.match(text, place), _ATTACHED.match(text, place)
        if accent:
            command = "tilde" if accent[2] == "~" else "hat"
            parts.append(rf"\{command}{{{accent[1]}}}")
            place = accent.end()
        elif attached and attached[2] == "bar":
            parts[-1] = rf"\bar{{{parts[-1].strip()}}}"
            place = attached.end()
        elif attached:
            plus = "^{+}" if attached[3] else ""
            parts.append(f"{attached[1]}{{{_index(attached[2])}}}{plus}")
            place = attached.end()
        elif text.startswith("sqrt(", place):
            end = _closing_bracket(text, place + 4)
            parts.append(rf"\sqrt{{{to_tex(text[place + 5 : end])}}}")
            place = end + 1
        else:
            token = _TOKEN.match(text, place)
            assert token is not None
            parts.append(_sign_or_word(token[0], text[:place], text[token.end() :]))
            place = token.end()
    return "".join(parts)


def _closing_bracket(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text)


def _index(content: str) -> str:
    """Return the content of an index or a power; short names are several indices."""
    inside = content[1:-1] if content[0] in "{(" else content
    if inside == "l2r":  # FedSR's name
        return r"\mathrm{l2r}"
    is_several = re.fullmatch(r"[a-z]{2}", inside) and inside not in GREEK
    return inside if is_several else to_tex(inside)


def _sign_or_word(token: str, before: str, after: str) -> str:
    if token == "cross-entropy":
        return r"\text{cross-entropy}"
    if token[0].isascii() and token[0].isalpha():
        return _word(token)
    if token == "<" and after[:1] not in ("", " "):
        return r"\langle "
    if token == ">" and before[-1:] not in ("", " "):
        return r"\rangle "
    return SIGNS.get(token, token)


def _word(word: str) -> str:
    letters = word.rstrip("0123456789")
    if letters in GREEK or letters in FUNCTIONS:
        tex = f"\\{letters}"
    else:
        tex = NAMES.get(letters) or (letters if len(letters) == 1 else rf"\mathrm{{{letters}}}")
    digit = word[len(letters) :]
    return f"{tex}_{{{digit}}}" if digit else f"{tex} "


# --- MathML -------------------------------------------------------------------------------------
def visit_inline(self: Any, node: nodes.math) -> None:
    """Write a formula in a sentence."""
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula of its own."""
    self.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode
