import keyword

import pytest
import torch

from shardlab.data_sets import grammar_text, load_text


def test_the_standard_library_is_more_than_ten_megabytes_of_python():
    data = load_text("stdlib", 64)
    assert len(data) > 10_000_000
    assert data.tokens.dtype == torch.uint8
    assert data.floor_nats_per_byte is None
    text = bytes(data.tokens.numpy()).decode("utf-8", errors="replace")
    assert all(word in text for word in keyword.kwlist)
    assert "site-packages/torch" not in text


def test_the_grammar_knows_its_floor():
    data = load_text("grammar", 64)
    assert len(data) == 4_000_000
    assert 0 < data.floor_nats_per_byte < 1
    assert bytes(data.tokens[:1000].numpy()) == grammar_text(1000)


def test_any_file_is_bytes(tmp_path):
    path = tmp_path / "any.bin"
    path.write_bytes(bytes(range(256)))
    for source in (path, str(path)):
        data = load_text(source, 255)
        assert data.tokens.tolist() == list(range(256))
        assert data.name == str(path)
    path.write_bytes(b"changed")
    assert len(load_text(path, 3)) == 7


def test_errors_name_text_with_path_and_sizes(tmp_path):
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_bytes(b"")
    short.write_bytes(b"x" * 128)
    for text, seq_len, words in (
        (tmp_path / "missing", 8, rf"text: {tmp_path}/missing cannot be read: No such file or directory; give stdlib"),
        (tmp_path, 8, rf"text: {tmp_path} cannot be read: Is a directory; give stdlib"),
        (empty, 8, rf"text: {empty} has 0 bytes; one sequence of seq_len=8"),
        (short, 128, rf"text: {short} has 128 bytes; .* seq_len=128 .* need 129"),
        (short, 0, "seq_len: 0 is below 1"),
    ):
        with pytest.raises(ValueError, match=rf"^{words}"):
            load_text(text, seq_len)
    assert len(load_text(short, 127)) == 128
