"""Words of the reason for which each wrong answer must fail, each its own."""

from tests.exercises import wrong
from tests.exercises import wrong_times_and_axes as second

WRONG = {
    "collectives.ring_all_reduce": {
        wrong.ring_in_ceil_chunks: "4 ranks, 3 elements: rank . raised IndexError",
        wrong.half_a_ring: "2 ranks, 8 elements: rank 0, x after the call, element 0 .bytes 0 to 7.*4 of 8",
        wrong.whole_vectors: "3 ranks, 7 elements: rank 0 sent 112 B where 96 B.*send of 56 B",
        wrong.librarys_own: "2 ranks, 8 elements: rank 0, message 0 is all_reduce of 64 B .*allowed: send and recv",
        wrong.receives_first: "2 ranks, 8 elements: ranks waited in a collective.*recv",
    },
    "buckets.assign": {
        wrong.buckets_of_forward: r"four parameters.*result\[0\]\[0\]: 3 is wanted, 0 was found",
        wrong.closed_when_past: r"one parameter is larger.*1 items? (is|are) wanted, 2 were found",
        wrong.forgets_the_last: r"four parameters.*result: 2 items are wanted, 1 was found",
        wrong.empty_before_a_large_one: r"no parameters.*0 items are wanted, 1 was found",
        wrong.never_exactly_full: r"four parameters.*result\[0\]: 2 items are wanted, 1 was found",
    },
    "data_parallel.hooks": {
        wrong.forgets_to_divide: r"^1 micro-batch: rank 0, result\['gradients'\]\['trunk.weight'\], element 0",
        wrong.all_at_the_end: r"^1 micro-batch: rank 0, result\['sends during backward'\]: True is wanted",
        wrong.sends_every_micro_batch: r"^2 micro-batches: rank 0, result\['gradients'\]",
        wrong.waits_for_the_unused: r"^rank 0 does not use the right branch: ranks waited in .*rank 1 in all",
        wrong.waits_at_once: r"^1 micro-batch: rank 0, result\['waits during backward'\]: False is wanted",
        wrong.hooks_as_they_come: r"^rank 0 does not use the right branch: rank . raised MismatchError",
    },
    "zero1.owners": {
        wrong.chunks_rounded_down: r"^3 ranks.*rank 0, result\['ranges'\]\['weight'\]\[1\]: 7 is wanted, 6 was found",
        wrong.whole_parameters: r"^3 ranks.*rank 0, result\['ranges'\]: 'head' should not be there",
        wrong.empty_ranges: r"^3 ranks.*rank 0, result\['ranges'\]: 'bias' should not be there; it is \[0, 0\]",
        wrong.offsets_on_the_line: r"^3 ranks.*rank 1, result\['ranges'\]\['bias'\]\[0\]: 0 is wanted, 7 was",
        wrong.padding_too: r"^3 ranks.*rank 1, result\['ranges'\]\['bias'\]\[1\]: 3 is wanted, 7 was found",
    },
    "clip.global_norm": {
        wrong.local_norm: r"^2-norm.*rank 0, result: 13.0 is wanted, 5.0 was found",
        wrong.sum_of_norms: r"^2-norm.*rank 0, result: 13.0 is wanted, 17.0 was found",
        wrong.a_rank_without_shards_fails: r"^2-norm.*rank 1 raised",
        wrong.powers_of_inf: r"^inf-norm.*rank 0, result: 7.0 is wanted, 12.0 was found",
        wrong.largest_with_sign: r"^inf-norm.*rank 0, result: 7.0 is wanted, 5.0 was found",
        wrong.asks_twice: r"^2-norm.*rank 0 sent 2 messages where 1 is enough; message 1 is the first too many",
    },
    "zero3.forward": {
        wrong.not_ahead: r"^2 ranks, 4 units: rank 0, result\['events'\]\[1\]: 'gather 1' is wanted, 'use 0' was found",
        wrong.keeps_the_last: r"^2 ranks, 4 units: rank 0, result\['events'\]: 12 items are wanted, 11 were found",
        wrong.frees_one_late: r"^2 ranks, 4 units: .*result\['events'\]\[3\]: 'free 0' is wanted, 'gather 2' was found",
        wrong.past_the_end: r"^3 ranks, 2 units: rank . raised IndexError",
        wrong.frees_before_use: r"^2 ranks, 4 units: rank . raised RuntimeError: unit 0 is used, but",
    },
    "checkpoint.reshard": {
        wrong.first_file_only: r"^4 to 3: rank 0, result\['weight'\]\[1\], element 5 .*5 is wanted, -1 was found",
        wrong.forgets_where_it_starts: r"^4 to 3: rank 2, result\['head'\]\[0\]: 3 is wanted, 0 was found",
        wrong.each_parameter_in_parts: r"^4 to 3: rank 0, result: 'bias' should not be there; it is ",
        wrong.in_the_order_of_saving: r"^4 to 2, the last saved first: rank 0, result",
        wrong.files_handed_on: r"^4 to 3: rank 0, result: 'head' should not be there",
    },
    "overlap.exposed": {
        second.every_pair: r"^two messages at once: rank 0, result\[0\]: 5.0 is wanted, 7 was found",
        second.waits_compute: r"^compute that waits for the message.*result\[0\]: 2.0 is wanted, 10.0 was found",
        second.first_to_last: r"^a gap in which nothing is sent: rank 0, result\[0\]: 0.0 is wanted, 12.0 was found",
        second.lengths_alone: r"^a gap in which nothing is sent: rank 0, result\[0\]: 0.0 is wanted, 8.0 was found",
        second.share_in_place_of_a_time: r"^two messages at once: rank 0, result\[0\]: 5.0 is wanted, 0.5 was found",
    },
    "link.smallest_bucket": {
        second.latency_forgotten: r"^only the latency is too long.*: 3 is wanted, 1 was found",
        second.on_average: r"^layers that differ.*: 2 is wanted, 1 was found",
        second.last_bucket_forgotten: r"^8 equal layers.*: 4 is wanted, 3 was found",
        second.all_in_one: r"^only the latency is too long.*: 3 is wanted, 6 was found",
        second.none_hides: r"^a link that never keeps up.*: 5 is wanted, None was found",
    },
    "fsdp.units": {
        second.one_for_each_layer: r"^no prefetch: rank 0 sent 6 messages where 2 are enough",
        second.prefetch_forgotten: r"^one unit ahead: rank 0 held 192 B at once, and 128 B are allowed",
        second.half_the_budget_each: r"^one unit ahead, a large layer: rank 0 sent 4 messages where 3 are enough",
        second.never_full: r"^no prefetch: rank 0 sent 4 messages where 2 are enough.*all_gather of 64 B$",
        second.by_size: r"^no prefetch: rank 0, result\['layers'\]\[0\]: 0 is wanted, 1 was found",
    },
    "tensor.column_row": {
        second.bias_on_every_rank: r"^2 ranks: rank 0, result\['output'\], element 0 .* 2.52532 was found; 6 of 6",
        second.gradient_of_x_in_terms: r"^2 ranks: rank 0, result\['x'\], element 0 .* 1.28418 was found",
        second.relu_forgotten_in_backward: r"^2 ranks: rank 0, result\['x'\], element 0 .* 0.130713 was found",
        second.bias_gradient_summed: r"^2 ranks: rank 0, result\['row_bias'\], element 0 .* 3.90075 was found; 3 of 3",
        second.features_gathered: r"^2 ranks: rank 0, message 0 is all_gather of 48 B .*; allowed: all_reduce",
        second.weights_reduced_too: r"^2 ranks: rank 0 sent 3 messages where 2 are enough; .*of 72 B",
    },
    "mesh.who_reduces": {
        second.over_all_ranks: r"^2 data x 2 tensor: .*\['output'\], element 0 .*: 3 is wanted, 26 was found",
        second.divided_by_all: r"^2 data x 2 tensor: .*\['slice'\], element 0 .*: 1.5 is wanted, 0.75 was found",
        second.whole_counted_twice: r"^2 data x 2 tensor: rank 0, result\['norm'\]: 13.39.* is wanted, 15.87",
        second.axes_exchanged: r"^2 data x 2 tensor: .*\['output'\], element 0 .*: 3 is wanted, 12 was found",
        second.whole_over_both: r"^2 data x 2 tensor: rank 0 sent 5 messages where 4 are enough.*of 8 B over tensor",
        second.norm_of_this_rank: r"^2 data x 2 tensor: rank 0, result\['norm'\]: 13.39.* is wanted, 9.0 was found",
    },
    "scaling.break_even": {
        second.nothing_hides: r"^four buckets: .*: 26 is wanted, 40 was found",
        second.forward_hides_too: r"^four buckets: .*: 26 is wanted, 22 was found",
        second.messages_at_once: r"^four buckets: .*: 26 is wanted, 9 was found",
        second.as_fast_is_enough: r"^exactly as fast with 3 rows: .*: 4 is wanted, 3 was found",
        second.as_fast_as_one_step: r"^one bucket: .*: 39 is wanted, 403 was found",
    },
    "precision.unscale": {
        second.asks_nobody: r"^an inf on rank 1: rank 0, result\[0\]: None is wanted",
        second.nan_overlooked: r"^a NaN on rank 0: rank 0, result\[0\]: None is wanted",
        second.scale_kept: r"^an inf on rank 1: rank 0, result\[1\]: 512.0 is wanted, 1024.0",
        second.first_shard_only: r"^rank 0 has no shards: rank 0, result\[0\]: None is wanted",
        second.sends_everything: r"^an inf on rank 1: rank . raised MismatchError",
    },
}
