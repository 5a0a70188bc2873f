"""Write texts with a trained language model, into samples.txt in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from raysim.data.causal import Vocabulary, stored_vocabulary
from raysim.primitives.files import replace_file
from raysim.primitives.streams import stream
from raysim.results.observers import CurrentRun, Observer, PrintLine
from raysim.results.shared_model import load_shared_model
from raysim.results.stored_runs import SAMPLES
from raysim.simulation.events import Finished

if TYPE_CHECKING:
    from raysim.api.declarations import Generation
    from raysim.training.run_spec import RunSpec

LINE = "-" * 72  # between two texts


def continue_text(
    model: nn.Module,
    vocabulary: Vocabulary,
    length: int,
    prompt: str,
    generate: Generation,
    rng: np.random.Generator,
) -> str:
    """Return a prompt followed by the text that a model writes after it.

    The text ends at the end of a document, or after `generate.tokens` tokens.
    model: a language model. It takes tokens, int [batch, positions], and returns the logits of the
    token that follows each position, [batch, tokens of the vocabulary, positions].
    length: the number of positions that the model takes.
    """
    written = [vocabulary.end, *vocabulary.encode(prompt).tolist()]
    first = len(written)
    for _ in range(generate.tokens):
        seen = written[-length:]
        # the last token does not depend on the rest of the row
        row = torch.full((1, length), vocabulary.tokens.padding)
        row[0, : len(seen)] = torch.tensor(seen)
        with torch.no_grad():
            logits: Tensor = model(row)[0, :, len(seen) - 1].double()
        token = _draw_token(logits, generate.temperature, rng)
        if token == vocabulary.end:
            break
        written.append(token)
    return prompt + vocabulary.decode(written[first:])


def _draw_token(logits: Tensor, temperature: float, rng: np.random.Generator) -> int:
    if not temperature or not bool(logits.isfinite().all()):
        return int(logits.argmax())
    sums = (logits / temperature).softmax(0).cumsum(0).numpy()
    return min(int(np.searchsorted(sums, rng.random() * sums[-1], side="right")), len(sums) - 1)


def write_texts(spec: RunSpec, model: nn.Module, generate: Generation) -> list[str]:
    """Return a text for each prompt; without prompts, one text after an empty prompt.

    Equal models, settings and seeds give equal texts.
    model: a language model. It takes tokens, int [batch, positions], and returns the logits of the
    token that follows each position, [batch, tokens of the vocabulary, positions].
    """
    dataset = spec.data.open()
    vocabulary = stored_vocabulary(dataset.tokenizer, dataset.class_names)
    texts = []
    with _torch_threads(spec.threads):
        for number, prompt in enumerate(generate.beginnings):
            rng = stream(spec.settings.seed, "generate", number)
            text = continue_text(model, vocabulary, dataset.shape[0], prompt, generate, rng)
            texts.append(text)
    return texts


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads inside `with`.

    Texts depend on this number, so they are written with as many threads as training has.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class TextSamples(Observer):
    """An observer that writes samples.txt, if clients share a language model.

    If `evaluate.generate` asks for 0 tokens, it writes nothing. If each client has its own model,
    it prints how to get texts.
    """

    def __init__(self, spec: RunSpec, note: PrintLine):
        self._spec, self._note = spec, note

    def on_finish(self, run: CurrentRun, event: Finished) -> None:
        """Write the texts of the final model."""
        generate = self._spec.settings.evaluate.generate
        if self._spec.task.kind != "causal" or not generate.tokens:
            return
        loaded = load_shared_model(self._spec, run.folder / "model.safetensors")
        if loaded is None:
            advice = f"raysim.load({str(run.folder)!r}).text(client=0) returns a text of client 0"
            if not self._spec.settings.checkpoint.every:
                advice = "With checkpoint.every above 0, result.text(client=0) returns a text"
            self._note(
                f"samples.txt is not written, because each client has a model of its own. {advice}"
            )
            return
        model, _ = loaded
        texts = write_texts(self._spec, model, generate)
        replace_file(run.folder / SAMPLES, f"\n{LINE}\n".join(texts).encode())
