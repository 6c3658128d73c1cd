"""Bytes in tensors at the peak of a transformer's training step on a rank, by formula.

    model states          ``formulas.model_states``, sharded as the strategy says; gradients that add up over
                          micro-batches in ``no_sync()`` are whole
    activations           ``formulas.activation_bytes`` a layer, for the MLP's form, shared keys and values, no dropout;
                          2 b s h where it is recomputed; selectively, also attention and every second product
    sequence parallel     norms and residuals in parts; 4 b s h of an input that is gathered, and of its gradient
    gathered parameters   root and two layers; all of zero3 and shard_grad_op
    logits                10 bytes each: in 16 bits, and in 32 bits with a gradient; 4 where one kernel makes the loss;
                          or, after them and where it is more, a layer that is recomputed whole
    zero3                 where it is more than activations and logits: the gradients, whole until backward has ended

Legend: b sequences, s tokens of a sequence, h hidden. Sources: see ``formulas``.
"""

from shardlab.planner.formulas import Layer, ModelStates, activation_bytes, states_of
from shardlab.planner.job import Job

LOGIT_BYTES = {"gpt": 4, "llama": 10, "compiled": 10}


def rest_bytes(job: Job) -> float:
    """Bytes of parameters, gradients and optimizer state that a rank has between two steps."""
    return _states(job).total_bytes


def peak_bytes(job: Job) -> float:
    """Bytes in tensors where a rank has most: in the loss, or in the first layer of backward."""
    params, layer = job.num_params / job.tensor, job.layer_params / job.tensor
    states, whole_gradients = _states(job), params * job.kept.gradient
    found = states.total_bytes
    if job.keeps_whole_gradients:
        found += whole_gradients - states.gradient_bytes
    if job.row.keeps_all:
        found += params * job.itemsize
    elif job.row.by_unit:
        found += (job.root_params / job.tensor + 2 * layer) * job.itemsize
    whole, kept = _activations(job)
    logits = logits_bytes(job)
    again = job.layers if job.recompute in ("full", "selective") and job.recomputed else job.recomputed
    computed = again * kept + (job.layers - again) * whole + max(logits, whole if again else 0)
    if job.residual_ranks > 1:
        computed += 2 * job.tokens * job.hidden * job.itemsize
    if job.row.parameters and not job.row.by_unit and not job.keeps_whole_gradients:
        computed = max(computed, whole_gradients)
    return found + computed


def logits_bytes(job: Job) -> float:
    """Bytes of the logits in the loss, [tokens of a micro-batch, vocabulary], in all copies."""
    return job.tokens * job.vocab / job.tensor * LOGIT_BYTES[job.written]


def _states(job: Job) -> ModelStates:
    """Of parameters, gradients and optimizer state at rest."""
    return states_of(job.strategy, job.row, round(job.num_params / job.tensor), job.sizes, job.kept)


def _activations(job: Job) -> tuple[float, float]:
    """Of a layer that keeps everything, and of one that is recomputed."""
    sizes = Layer(job.hidden, job.heads, job.seq_len, job.micro_batch)
    drops_scores = job.kernel != "unfused" or job.recompute == "selective"
    whole = activation_bytes(
        sizes, job.tensor, sequence_parallel=job.sequence_parallel, recompute="selective" if drops_scores else "none"
    )
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
