"""A card is measured by its seconds: from those of the formulas the numbers of a card come back."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from shardlab.bench import calibrate_card as calibrating
from shardlab.bench.calibrate_card import ITEMSIZES, calibrate_card, parts
from shardlab.cli import app
from shardlab.forecast import predict_step
from shardlab.forecast.transformer import attention_share, with_tail
from shardlab.planner.gpu import Gpu

JOB = {
    "hidden": 4096, "layers": 4, "heads": 32, "kv_heads": 32, "ffn": 16384, "vocab": 50368, "seq_len": 2048,
    "micro_batch": 4, "data": 1, "strategy": "single",
}  # fmt: skip


@dataclass
class ToldCard:
    """A card on a clock that is told: it takes what the formulas say of ``truth``."""

    name: str
    truth: Gpu
    precisions: tuple[str, ...] = ("bf16", "fp16", "tf32")
    slower: float = 1.0  # the product of one shape

    @property
    def memory_bytes(self):
        return self.truth.memory_bytes

    @property
    def multiprocessors(self):
        return self.truth.multiprocessors

    @property
    def bandwidth(self):
        return self.truth.memory_bandwidth * self.truth.memory_fraction

    def product(self, precision, rows, inner, columns):
        rate = self.truth.peaks[precision] * self.truth.product_fractions[precision]
        seconds = 2 * rows * inner * columns / rate * with_tail(rows, inner, columns, self.multiprocessors)
        if inner == 16384:
            seconds *= self.slower
        return seconds + rows * columns * ITEMSIZES[precision] / self.bandwidth

    def attention(self, precision, sequences, heads, tokens, dim):
        rate = self.truth.peaks[precision] * self.truth.attention_fraction * attention_share(dim, tokens)
        return (1 + 2.5) * sequences * heads * 4 * tokens * tokens * dim / 2 / rate

    def copy(self, num_bytes):
        return 2 * num_bytes / self.bandwidth

    def host_copy(self, num_bytes):
        return num_bytes / 40e9

    def launches(self, kind):
        return {"eager": (4e-3, 200), "compiled": (1e-3, 100), "graph": (0.4e-3, 200)}[kind]


FRACTIONS = {"bf16": 0.6, "fp16": 0.65, "tf32": 0.5}
SLOW_H100 = replace(
    Gpu.preset("h100"), memory_fraction=0.9, product_fraction=0.6, product_fractions=FRACTIONS, attention_fraction=0.3,
    host_seconds={"eager": 20e-6, "compiled": 10e-6, "graph": 2e-6},
)  # fmt: skip


def test_what_a_card_reaches_comes_back_and_a_forecast_reads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device, told = ToldCard("NVIDIA H100 80GB HBM3", SLOW_H100), []
    found = calibrate_card(device, told.append)
    gpu = found.gpu
    assert told == [*parts(device)]
    assert gpu.product_fractions == pytest.approx(FRACTIONS)
    assert gpu.host_seconds == pytest.approx(SLOW_H100.host_seconds)
    for name in ("memory_fraction", "product_fraction", "attention_fraction", "peaks", "inside", "link", "contention"):
        assert getattr(gpu, name) == pytest.approx(getattr(SLOW_H100, name)), name
    assert found.worst_product == pytest.approx(0.0, abs=1e-9)
    gpu.write(tmp_path / "card.json")
    assert Gpu.read("card.json") == gpu == Gpu.parse("card.json")
    measured, sheet = (predict_step(**JOB, hardware=name) for name in ("card.json", "h100"))
    assert measured.seconds > 1.1 * sheet.seconds
    assert measured.peak_bytes == sheet.peak_bytes
    # Nothing but the host's pace is left where a kernel has little to do.
    small = JOB | {"hidden": 512, "heads": 8, "kv_heads": 8, "ffn": 2048, "seq_len": 128, "micro_batch": 1}
    steps = (predict_step(**small, hardware="card.json", compiled=compiled) for compiled in (False, True))
    eager, compiled = (step.parts["waiting for the host"] for step in steps)
    assert eager > compiled > 0


def test_a_card_that_is_in_no_table_has_the_rates_that_were_measured():
    truth = replace(SLOW_H100, product_fractions=dict.fromkeys(FRACTIONS, 1.0))
    found = calibrate_card(ToldCard("Unknown Card", truth, slower=1.25)).gpu
    assert found.peaks == pytest.approx({name: truth.peaks[name] for name in FRACTIONS})
    assert found.product_fraction == pytest.approx(1.0)
    assert (found.memory_fraction, found.memory_bandwidth) == (1.0, pytest.approx(0.9 * truth.memory_bandwidth))
    assert (found.inside, found.link.bandwidth_gbps) == ("pcie5", pytest.approx(320))
    assert (found.name, found.contention) == ("Unknown Card, measured", 0.189)
    assert "the largest rates that were measured" in found.source


def test_a_card_whose_memory_alone_was_known_keeps_it_and_its_link():
    truth = replace(SLOW_H100, product_fractions=dict.fromkeys(FRACTIONS, 1.0))
    found = calibrate_card(ToldCard("Tesla T4", truth, precisions=("fp16",))).gpu
    assert (found.name, found.link, [*found.peaks]) == ("t4, measured", Gpu.parse("t4").link, ["fp16"])
    assert found.inside == "pcie5"


def test_a_shape_that_is_unlike_the_others_is_said():
    assert calibrate_card(ToldCard("NVIDIA L40S", SLOW_H100, slower=1.25)).worst_product == pytest.approx(0.2, abs=0.01)


def test_the_command_says_and_writes_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardlab.bench.calibrate_card.CudaCard", lambda: ToldCard("NVIDIA H100 80GB HBM3", SLOW_H100))
    done = CliRunner().invoke(app, ["calibrate", "--device", "cuda"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for words in ("h100-sxm, measured", "60% of the peak in bf16 products", "20 us eager, 10 us compiled, 2 us graph"):
        assert words in done.output
    assert Gpu.read("card.json").host_seconds["eager"] == pytest.approx(20e-6)


def test_where_nothing_compiles_the_rest_is_kept_and_that_is_said(tmp_path, monkeypatch):
    class Bare(ToldCard):
        def launches(self, kind):
            if kind == "compiled":
                raise RuntimeError("Cannot find a working triton installation\nand more")
            return super().launches(kind)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardlab.bench.calibrate_card.CudaCard", lambda: Bare("NVIDIA H100 80GB HBM3", SLOW_H100))
    done = CliRunner().invoke(app, ["calibrate", "--device", "cuda"], env={"COLUMNS": "200"})
    said = "compiled launches, for which what is usual is taken: RuntimeError: Cannot find a working triton"
    assert (done.exit_code, said in done.output) == (0, True), done.output
    assert "20 us eager, 2 us graph" in done.output
    assert [*Gpu.read("card.json").host_seconds] == ["eager", "graph"]


def test_a_product_in_32_bits_has_tensor_cores_while_it_is_measured_alone(monkeypatch):
    """On the CPU, where all but the card's name is as on a card."""
    device, seen, randn = object.__new__(calibrating.CudaCard), [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: randn(*shape, dtype=dtype))
    monkeypatch.setattr(
        calibrating, "_seconds", lambda call: seen.append((torch.get_float32_matmul_precision(), call().dtype))
    )
    before = torch.get_float32_matmul_precision()
    for precision in ("bf16", "tf32"):
        device.product(precision, 2, 3, 4)
    assert seen == [("highest", torch.bfloat16), ("high", torch.float32)]
    assert torch.get_float32_matmul_precision() == before


def test_a_profiler_that_sees_no_kernel_is_no_kernel_that_takes_all_the_time(monkeypatch):
    seen = SimpleNamespace(events=lambda: [SimpleNamespace(device_type="DeviceType.CPU")])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(calibrating, "profile", lambda activities: nullcontext(seen))
    with pytest.raises(RuntimeError, match="the profiler sees no kernel"):
        calibrating._kernels(lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda"], "device: cuda is given, and torch"),
        (["--device", "tpu"], "device: 'tpu' is not one of cpu, cuda"),
        (["--device", "cuda", "--ranks", "2"], "ranks: of ranks on the CPU, and not of a card; leave it out"),
    ],
)  # fmt: skip
def test_what_is_not_here_is_refused(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", *words], env={"COLUMNS": "200"})
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 1, "memory_bytes": 1, "link": "1"}'])
def test_a_file_that_is_no_card_is_refused(tmp_path, text):
    path = tmp_path / "card.json"
    path.write_text(text)
    for read in (Gpu.read, lambda path: Gpu.parse(str(path)), lambda path: predict_step(**JOB, hardware=str(path))):
        with pytest.raises(ValueError, match=r"^gpu: .*card.json cannot be read .*calibrate --device cuda --out"):
            read(path)
