"""Bytes in tensors at the peak of a transformer's training step on a rank, by formula.

    model states          ``formulas.model_states``, sharded as the strategy says; gradients that add up over
                          micro-batches in ``no_sync()`` are whole
    activations           ``activation_bytes`` a layer, for the MLP's form, shared keys and values, no dropout;
                          2 b s h where it is recomputed; selectively, also attention and every second product;
                          a norm keeps its input in 16 bits, as a fused one does: see ``norm_copies_bytes``
    sequence parallel     norms and residuals in parts; 4 b s h of an input that is gathered, and of its gradient
    gathered parameters   root and two layers; all of zero3 and shard_grad_op
    logits                10 bytes each: in 16 bits, and in 32 bits with a gradient; 4 where one kernel makes the loss;
                          or, after them and where it is more, a layer that is recomputed whole
    zero3                 where it is more than activations and logits: the gradients, whole until backward has ended

Bytes of activations a transformer layer keeps for backward, in 16-bit training:

==================================  ===========================================
layer                               bytes per rank
==================================  ===========================================
whole                               s b h (34 + 5 a s / h)
tensor parallel                     s b h (10 + 24 / t + 5 a s / (h t))
tensor and sequence parallel        s b h (34 / t + 5 a s / (h t))
the same, inputs kept whole         s b h (4 + 30 / t + 5 a s / (h t))
==================================  ===========================================

The term 5 a s / h is the attention matrix with its softmax and dropout; selective recomputation, and attention in one
kernel that never stores it, drop it. Full recomputation keeps the layer's input only, 2 s b h. The fourth row is
sequence parallelism that gathers the inputs of attention and MLP once and keeps them, instead of gathering them again
in backward. Not counted, as in the paper: two numbers a token and LayerNorm.

Legend: s tokens of a sequence, b sequences, h hidden, a heads, t tensor-parallel ranks. Matrices and GELU inputs of 2
bytes an element, dropout masks of 1. Source: Korthikanti et al., arXiv 2205.05198, table 2.
"""

from dataclasses import dataclass
from fractions import Fraction

from shardlab.forecast.job import Job
from shardlab.partition.chunks import require_count
from shardlab.planner.formulas import ModelStates, as_number, states_of

LOGIT_BYTES = {"gpt": 4, "llama": 10, "compiled": 10}


RECOMPUTATIONS = ("none", "selective", "full")


@dataclass(frozen=True)
class Layer:
    """Sizes of a transformer layer; its MLP is four times as wide as its residual."""

    hidden: int
    num_heads: int
    seq_len: int
    micro_batch: int

    def __post_init__(self) -> None:
        """All sizes must be 1 or more."""
        for field in ("hidden", "num_heads", "seq_len", "micro_batch"):
            require_count(field, getattr(self, field), 1)


def activation_bytes(
    layer: Layer, num_ranks: int = 1, *, sequence_parallel: bool = False, regather: bool = True, recompute: str =
    "none",
) -> float:  # fmt: skip
    """Bytes per layer and rank, a whole number where the sizes divide.

    Args:
        layer: its sizes.
        num_ranks: tensor-parallel ranks.
        sequence_parallel: whether LayerNorm, dropout and the residual are in parts too.
        regather: with ``sequence_parallel``: the inputs of attention and MLP are kept in parts and gathered again.
        recompute: 'none', 'selective' (the attention matrix) or 'full' (everything but the layer's input).

    Raises:
        ValueError: an unknown ``recompute``, or ``num_ranks`` below 1.
    """
    require_count("num_ranks", num_ranks, 1)
    if recompute not in RECOMPUTATIONS:
        raise ValueError(f"recompute: {recompute!r} is not one of {', '.join(RECOMPUTATIONS)}")
    sbh = layer.seq_len * layer.micro_batch * layer.hidden
    outside = Fraction(1, num_ranks if sequence_parallel else 1)  # what heads and features do not divide
    if recompute == "full":
        return as_number(2 * sbh * outside)
    inputs = outside if regather else Fraction(1)
    factor = 6 * outside + 4 * inputs + Fraction(24, num_ranks)
    if recompute == "none":
        factor += Fraction(5 * layer.num_heads * layer.seq_len, layer.hidden * num_ranks)
    return as_number(sbh * factor)


def rest_bytes(job: Job) -> float:
    """Bytes of parameters, gradients and optimizer state that a rank has between two steps."""
    return _states(job).total_bytes


def peak_bytes(job: Job) -> float:
    """Bytes in tensors where a rank has most: in the loss, or in the first layer of backward."""
    params, layer = job.held_params / job.tensor, job.held_layer_params / job.tensor
    states, whole_gradients = _states(job), params * job.kept.gradient
    found = states.total_bytes
    if job.keeps_whole_gradients:
        found += whole_gradients - states.gradient_bytes
    if job.row.keeps_all:
        found += params * job.itemsize
    elif job.row.by_unit:
        found += (job.root_params / job.tensor + 2 * layer) * job.itemsize
    whole, kept = _activations(job)
    logits, again = logits_bytes(job), _layers_again(job)
    computed = again * kept + (job.layers - again) * whole + max(logits, whole if again else 0)
    if job.residual_ranks > 1:
        computed += 2 * job.tokens * job.hidden * job.itemsize
    if job.row.parameters and not job.row.by_unit and not job.keeps_whole_gradients:
        computed = max(computed, whole_gradients)
    return found + computed


def _layers_again(job: Job) -> float:
    return job.layers if job.recompute in ("full", "selective") and job.recomputed else job.recomputed


def norm_copies_bytes(job: Job) -> float:
    """Bytes beside the peak's that both norms of the layers keep where each operation in 32 bits is one of autograd's.

    For an element of the residual that is the input in 32 bits, in the place of 16, and the normalised one in 16.
    """
    return 8 * job.tokens * job.hidden / job.residual_ranks * (job.layers - _layers_again(job))


def logits_bytes(job: Job) -> float:
    """Bytes of the logits in the loss, [tokens of a micro-batch, vocabulary], in all copies."""
    return job.tokens * job.vocab / job.tensor * LOGIT_BYTES[job.written]


def _states(job: Job) -> ModelStates:
    """Of parameters, gradients and optimizer state at rest."""
    return states_of(job.strategy, job.row, round(job.held_params / job.tensor), job.sizes, job.kept)


def _activations(job: Job) -> tuple[float, float]:
    """Of a layer that keeps everything, and of one that is recomputed."""
    sizes = Layer(job.hidden, job.heads, job.seq_len, job.micro_batch)
    drops_scores = not job.stores_scores or job.recompute == "selective"
    whole = activation_bytes(
        sizes, job.tensor, sequence_parallel=job.sequence_parallel, recompute="selective" if drops_scores else "none"
    )
    if job.kernel == "op-by-op" and not drops_scores:
        # The softmax in 32 bits and its copy in 16: 6, and no mask of dropout.
        whole += job.tokens * job.seq_len * job.heads / job.tensor
    # The formula's MLP keeps what enters and leaves a GELU, 16 h; a gated one both inputs, SiLU's result, the product.
    mlp = (8 if job.is_gated else 4) * job.ffn - 16 * job.hidden
    # Likewise 8 h of queries, keys, values and the result of attention, which heads share or have other widths of.
    divided = mlp + 4 * job.heads_width * (1 + job.kv_share) - 8 * job.hidden
    masks = 2 * job.hidden  # of dropout, which nobody uses here
    kept = 2 * job.tokens * job.hidden / job.residual_ranks
    if job.recompute == "selective":
        # Results of attention, and of the query, value, first and last product; in GPT one product makes q, k and v.
        heads, hidden, kv = job.heads_width, job.hidden, job.kv_share
        products = heads + heads * kv + hidden if job.is_gated else heads * (1 + 2 * kv)
        kept += 2 * job.tokens * (heads + products + job.ffn) / job.tensor
    scale = job.itemsize / 2
    return (whole + job.tokens * (divided / job.tensor - masks / job.residual_ranks)) * scale, kept * scale


def room_bytes(job: Job) -> float:
    """What the card's memory has beside the peak; below 0 where the peak has no room."""
    return job.card.memory_bytes - peak_bytes(job)
