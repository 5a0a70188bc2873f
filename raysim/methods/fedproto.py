"""FedProto: exchange the mean features of each class instead of parameters.

Source: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI
2022), Algorithm 1. Client i trains its own model and has n_ij samples of class j. h is the
extractor, d the number of its features, and C_j the prototype of class j.

    loss   cross-entropy + lam mean over the batch of |h(x) - C_y|^2 / d
    c_ij = mean of h(x) over client i's samples of class j, after training
    C_j  = sum_i n_ij c_ij / sum_i n_ij, over the participants

Departures from the paper
- A sample whose class has no C_j adds 0 to the mean over the batch, as in the authors' code.
- c_ij is measured in eval mode, without augmentation. If no participant has class j, C_j does not
  change.
- With predict=prototype, a client predicts the class of the nearest C_j among its own classes, as
  in the authors' code. It uses the C_j that it received for its last job. Without any, it uses its
  head.
- All clients have the same layers, unlike in the paper. A client also uploads zeros for the classes
  that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from raysim.api.declarations import FORWARD, Participation
from raysim.api.method import Method
from raysim.methods.fedpac import aggregate_prototypes
from raysim.primitives.checks import at_least, one_of

if TYPE_CHECKING:
    from raysim.api.context import Outputs
    from raysim.api.local_job import LocalJob, PersonalModel
    from raysim.api.server_view import Aggregation, ServerView
    from raysim.api.setup import Setup

Predictor: TypeAlias = Literal["head", "prototype"]

# The logit of a class without a prototype, finite so that losses are finite.
NEVER = -1e30


def class_means(
    batches: Iterable[tuple[Tensor, Tensor]], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the mean features [C, d] and the number of samples [C] of each class, float64.

    A class without samples has zeros.
    batches: the features [B, d] and the labels int64 [B] of each batch.
    """
    sums, counts = [], []
    for features, labels in batches:
        # A matrix product, because an indexed sum on a GPU has no fixed order.
        classes = torch.arange(num_classes, device=labels.device)
        members = (labels == classes.unsqueeze(1)).double()
        sums.append(members @ features.double())
        counts.append(members.sum(1))
    count = torch.stack(counts).sum(0)
    means = torch.stack(sums).sum(0) / count.clamp_min(1).unsqueeze(1)
    return means, count


def prototype_loss(features: Tensor, labels: Tensor, prototypes: Tensor, present: Tensor) -> Tensor:
    """Return the batch mean of |h - p|^2 / d for features h [d] and the prototype p of their class.

    Samples of classes without a prototype add 0.
    features: [B, d].
    labels: int64 [B].
    prototypes: [C, d].
    present: bool [C], True for classes with a prototype.
    """
    has_prototype = present[labels].unsqueeze(1).to(features.dtype)
    distance = (features - prototypes[labels]) * has_prototype
    return distance.square().mean()


def nearest_prototype_head(
    prototypes: Mapping[int, Tensor], num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return weight [C, d] and bias [C] of a linear head that predicts the nearest prototype.

    For features h and a prototype c [d], the logit is 2 h.c - |c|^2.
    prototypes: the prototype of each class; a class without one is never predicted.
    """
    example = next(iter(prototypes.values()))
    weight = example.new_zeros(num_classes, len(example))
    bias = example.new_full((num_classes,), NEVER)
    for label, prototype in prototypes.items():
        weight[label] = 2 * prototype
        bias[label] = -prototype.square().sum()
    return weight, bias


class FedProto(Method):
    """A method that exchanges the mean features of each class instead of parameters.

    lam: the weight of the distance to prototypes.
    predict: "head" scores with the head; "prototype" predicts the class of the nearest prototype.
    """

    name = "fedproto"
    paper = "Tan et al., AAAI 2022"

    def __init__(self, lam: float = 1.0, predict: Predictor = "head"):
        self.lam = at_least("method.fedproto.lam", lam, 0.0)
        self.predict = one_of("method.fedproto.predict", predict, get_args(Predictor))

    # --- before the run -----------------------------------------------------------------------
    def setup(self, run: Setup) -> None:
        """Declare all networks as personal; declare the exchanged class means and prototypes."""
        run.needs("classes", "features")
        run.targets("integer")
        for other in ("fedpac", "ditto"):
            run.excludes(other, "it needs a shared model, but with FedProto no parameter is shared")
        run.private_parameters(_all_names)

        classes, features = run.task.num_classes, run.model.feature_dim
        run.upload("class_means", classes * features)
        run.upload("class_counts", classes)
        run.server_state("prototypes", lambda server: server.vector.new_zeros(classes, features))
        run.server_state("present", lambda server: torch.zeros(classes, dtype=torch.bool))
        run.send("prototypes", floats=classes * features)
        run.send("present", floats=classes)
        if self.predict == "head":
            run.skip("personalise")
            return
        run.excludes("fedrs", "its head has no bias, but predict=prototype needs one")
        run.require(
            isinstance(run.model.head, nn.Linear) and run.model.head.bias is not None,
            "method.fedproto.predict=prototype needs a linear head with a bias, but the head of "
            f"this model is {run.model.head}. Set method.fedproto.predict=head, or choose another "
            "model.",
        )
        run.client_state("prototypes", lambda samples: {})

    def cost(self, job: Participation) -> float:
        """Return the cost of the forward pass that measures class means: a third of an epoch."""
        return FORWARD * job.samples

    # --- a client's job -----------------------------------------------------------------------
    def loss(self, job: LocalJob, out: Outputs, loss: Tensor) -> Tensor:
        """Add lam times the distance to the prototypes."""
        prototypes, present = job.received["prototypes"], job.received["present"]
        term = prototype_loss(out.features, out.batch.targets, prototypes, present)
        return loss + self.lam * term

    def end(self, job: LocalJob) -> None:
        """Upload the class means of the trained model.

        With predict="prototype", also keep the received prototypes of the client's classes: the
        client is scored with these.
        """
        job.model.eval()
        with torch.no_grad():
            batches = ((job.model.features(inputs), labels) for inputs, labels in job.data())
            means, counts = class_means(batches, job.task.num_classes)
        job.model.train()
        job.upload["class_means"] = means.to(job.params)
        job.upload["class_counts"] = counts.long()
        if self.predict == "prototype":
            usable = job.received["present"] & (counts > 0)
            job.state["prototypes"] = {
                label: job.received["prototypes"][label].clone()
                for label in usable.nonzero().flatten().tolist()
            }

    def personalise(self, client: PersonalModel) -> None:
        """Replace the head by one that predicts the class of the nearest stored prototype.

        If the client has no stored prototype, the head stays.
        """
        prototypes = client.state["prototypes"]
        if not prototypes:
            return
        tensors = client.vector.named(client.vector.data, client.vector.counters)
        weight, bias = tensors["model.head.weight"], tensors["model.head.bias"]
        new_weight, new_bias = nearest_prototype_head(prototypes, len(bias))
        weight.copy_(new_weight)
        bias.copy_(new_bias)

    # --- an aggregation -----------------------------------------------------------------------
    def absorb(self, aggregation: Aggregation, server: ServerView) -> None:
        """Compute the prototypes of the participants' classes; other prototypes do not change."""
        new = aggregate_prototypes(
            class_means=torch.stack(aggregation.uploads("class_means")),
            class_counts=torch.stack(aggregation.uploads("class_counts")),
        )
        is_new = new["present"].unsqueeze(1)
        old = server.state["prototypes"]
        server.state["prototypes"] = torch.where(is_new, new["prototypes"], old)
        server.state["present"] = server.state["present"] | new["present"]


def _all_names(networks: Mapping[str, nn.Module]) -> Sequence[str]:
    """Return the names of all buffers and of the trainable parameters."""
    names = []
    for name, network in networks.items():
        trained = [path for path, tensor in network.named_parameters() if tensor.requires_grad]
        buffers = [path for path, _ in network.named_buffers()]
        names += [f"{name}.{path}" for path in (*trained, *buffers)]
    return names
