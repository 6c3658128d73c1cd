"""Small modules that are built as well-known ones are: by the names, the containers and the classes inside them."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

SIZE = 8


class Built(nn.Module):
    """A module that has a forward, which no test runs."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Residual(nn.Module):
    """A block: two layers around a residual."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class GPT2(nn.Module):
    """As nanoGPT is: embeddings of one class, the list of layers and a norm in a ``ModuleDict``, and a tied head."""

    def __init__(self, num_layers: int = 3, vocab_size: int = 11) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(vocab_size, SIZE), "wpe": nn.Embedding(vocab_size, SIZE), "drop": nn.Dropout(0.0),
            "h": nn.ModuleList(Residual() for _ in range(num_layers)), "ln_f": nn.LayerNorm(SIZE),
        })  # fmt: skip
        self.lm_head = nn.Linear(SIZE, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["drop"](parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[-1])))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


class Stack(nn.Module):
    """An encoder, or the inner model of a causal one; a decoder has more in each block."""

    def __init__(self, num_layers: int = 2, block: type[nn.Module] = Residual) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(500, SIZE)
        self.layers = nn.ModuleList(block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Llama(Built):
    """A model in ``model``, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Stack(), nn.Linear(SIZE, 500)


class EncoderDecoder(Built):
    """Two stacks of one class with equal shapes, and one embedding for both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(2), Stack(3)
        self.decoder.embed_tokens = self.encoder.embed_tokens


class Experts(Built):
    """A block with attention, a router and experts: what repeats inside it is no unit."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(SIZE, 2)
        self.router = nn.Linear(SIZE, 4)
        self.experts = nn.ModuleList(Residual() for _ in range(4))


class Bottleneck(Built):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3), nn.BatchNorm2d(out)
        self.downsample = None if channels == out else nn.Sequential(nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out))


class ResNet(Built):
    """Stages ``layer1``, ``layer2``, each a ``Sequential`` of blocks of which the first differs."""

    def __init__(self, *num_blocks: int) -> None:
        super().__init__()
        self.conv1, self.bn1, self.fc = nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.Linear(4 * 2 ** len(num_blocks), 10)
        for place, number in enumerate(num_blocks):
            wide = 4 * 2**place
            blocks = [Bottleneck(wide, 2 * wide), *(Bottleneck(2 * wide, 2 * wide) for _ in range(number - 1))]
            setattr(self, f"layer{place + 1}", nn.Sequential(*blocks))


class Down(Built):
    """A stage of a U-Net, with a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(Residual() for _ in range(2))


class Up(Down):
    pass


class AttentionDown(Down):
    pass


class UNet(Built):
    """Lists of stages, not all of one class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3)
        self.down_blocks = nn.ModuleList([AttentionDown(), AttentionDown(), Down()])
        self.mid_block = Residual()
        self.up_blocks = nn.ModuleList([Up(), Up(), Up()])


class WrittenOut(Built):
    """Blocks as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.outc = nn.Linear(8, 8), nn.Linear(8, 8)
        self.down1, self.down2, self.stage3a, self.stage4b = Residual(), Residual(), Residual(), Residual()


class Wrapper(Built):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class OneBlock(Built):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(9, SIZE), Residual(), nn.Linear(SIZE, 9)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(7, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)
    )


def stages() -> nn.Module:
    """Sequences in a sequence, with names."""
    inner = [nn.Sequential(Residual(), Residual()), nn.Sequential(OrderedDict(first=Residual(), second=Residual()))]
    return nn.Sequential(nn.Linear(3, SIZE), *inner, nn.Linear(SIZE, 3))


CASES = {
    "gpt2": (GPT2, ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
    "gpt2 of one layer and many words": (lambda: GPT2(1, 50_000), ["transformer.h.0"]),
    "llama": (Llama, ["model.layers.0", "model.layers.1"]),
    "encoder and decoder": (
        EncoderDecoder,
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2"],
    ),
    "towers in a dict": (
        lambda: nn.ModuleDict({"text": Stack(1), "image": Stack(1)}),
        ["text.layers.0", "image.layers.0"],
    ),
    "mixture of experts": (lambda: Stack(2, Experts), ["layers.0", "layers.1"]),
    "blocks in a dict": (
        lambda: Wrapper(nn.ModuleDict({"layer_0": Experts(), "layer_1": Experts()})),
        ["module.layer_0", "module.layer_1"],
    ),
    "layers in a dict": (
        lambda: Wrapper(nn.ModuleDict({"0": nn.Linear(3, 3), "1": nn.Linear(3, 3), "out": nn.Linear(9, 9)})),
        ["module.0", "module.1"],
    ),
    "blocks in a dict with words": (
        lambda: Wrapper(nn.ModuleDict({"north": Residual(), "south": Residual(), "one": nn.Linear(99, 99)})),
        ["module.north", "module.south"],
    ),
    "resnet": (lambda: ResNet(2, 3), ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer2.2"]),
    "resnet of one block a stage": (lambda: ResNet(1, 1), ["layer1", "layer2"]),
    "u-net": (UNet, [f"{side}_blocks.{place}" for side in ("down", "up") for place in range(3)]),
    "lists of lists": (
        lambda: Wrapper(nn.ModuleList([nn.ModuleList([Residual(), nn.Linear(8, 8)]), nn.ModuleList([Residual()])])),
        ["module.0.0", "module.0.1", "module.1.0"],
    ),
    "lists of sequences": (
        lambda: nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)]),
        ["0", "1"],
    ),
    "sequences in a sequence": (stages, ["1.0", "1.1", "2.first", "2.second"]),
    "written out": (WrittenOut, ["down1", "down2", "stage3a", "stage4b"]),
    "layers in a sequence": (mlp, ["0", "3", "5"]),
    "two halves of layers": (
        lambda: Wrapper(nn.ModuleDict({"features": mlp(), "classifier": mlp()})),
        [f"module.{half}.{place}" for half in ("features", "classifier") for place in (0, 3, 5)],
    ),
    "a stem before a large head": (
        lambda: nn.ModuleDict({"stem": mlp(), "head": nn.Linear(99, 99)}),
        ["stem", "head"],
    ),
    "nothing repeats": (OneBlock, ["embed", "block", "head"]),
    "nothing repeats, in wrappers": (
        lambda: Wrapper(Wrapper(OneBlock())),
        ["module.module.embed", "module.module.block", "module.module.head"],
    ),
    "torch's own": (
        lambda: nn.Transformer(8, 2, 2, 1, 16, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
    "a layer": (lambda: nn.Linear(3, 3), []),
    "parameters alone": (lambda: nn.ParameterDict({"w": nn.Parameter(torch.ones(3))}), []),
}  # fmt: skip
