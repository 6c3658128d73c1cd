"""One card is measured for forecasts, and a forecast for it is near a step that is run."""

from shardlab.bench.calibrate_card import CudaCard, calibrate_card


def test_a_card_is_measured(figure):
    found = calibrate_card(CudaCard())
    gpu = found.gpu
    for name in ("product_fractions", "attention_fraction", "memory_fraction", "host_seconds"):
        figure(f"calibrate, {name}", getattr(gpu, name))
    figure("calibrate, worst shape of a product", f"{found.worst_product:.0%}")
    assert all(0.05 < share < 1.5 for share in gpu.product_fractions.values())
    assert 0.02 < gpu.attention_fraction < 1.5
    assert 0.3 < gpu.memory_fraction <= 1.05
    assert gpu.host_seconds["graph"] < gpu.host_seconds["eager"] < 1e-3
