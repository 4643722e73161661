"""Foreign pickles are read and never run: at every place where a checkpoint of Megatron's has one."""

import io
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from triaxis.engine.errors import CheckpointError
from triaxis.models.interop.megatron import writer as megatron_writer
from triaxis.models.interop.megatron.files import open_checkpoint
from triaxis.models.interop.megatron.foreign_pickle import Inert, read_archive, read_pickle


class Runs:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    chunk = megatron_writer.OutgoingChunk("a.weight", (2, 3), (0, 0), torch.arange(6.0).view(2, 3))
    return megatron_writer.write_checkpoint(
        tmp_path, 7, [chunk], ["a._extra_state/shard_0_1"], {"iteration": 7}, {"x": 1}
    )


def test_what_is_asked_for_runs_nothing_and_is_there(checkpoint):
    opened = open_checkpoint(checkpoint.parent)
    assert torch.equal(opened.read("a.weight"), torch.arange(6.0).view(2, 3))
    assert torch.equal(opened.read("a.weight", ((1, 2), (1, 3))), torch.tensor([[4.0, 5.0]]))
    assert opened.objects == {"a._extra_state/shard_0_1"}
    assert (opened.common["iteration"], opened.args) == (7, {"x": 1})


def test_the_bait_would_run_where_pickle_loads_it(tmp_path):
    pickle.loads(pickle.dumps(Runs(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["metadata", "common", "chunk"])
def test_a_malicious_pickle_is_refused_by_name_and_not_run(checkpoint, tmp_path, place):
    bait = Runs(tmp_path / "ran")
    if place == "metadata":
        (checkpoint / ".metadata").write_bytes(pickle.dumps(bait))
    elif place == "common":
        (checkpoint / "common.pt").write_bytes(saved({"iteration": 7, "args": Namespace(x=bait)}))
    else:
        content = saved([bait])
        (checkpoint / "__0_0.distcp").write_bytes(content)
        record = pickle.loads((checkpoint / ".metadata").read_bytes())
        for index, place_of in record.storage_data.items():
            if index.fqn == "a.weight":
                place_of.offset, place_of.length = 0, len(content)
        (checkpoint / ".metadata").write_bytes(pickle.dumps(record))
    with pytest.raises(CheckpointError) as refused:
        opened = open_checkpoint(checkpoint)
        assert place == "chunk", "it was opened"
        opened.read("a.weight")
    assert "posix.mkdir" in str(refused.value)
    assert not (tmp_path / "ran").exists(), "it ran"


def test_an_object_beside_the_tensors_is_never_opened(checkpoint, tmp_path):
    """The last item of the file is the state beside the weights: with a bait in its place, all tensors are read."""
    data = checkpoint / "__0_0.distcp"
    content = data.read_bytes()
    at = content.rindex(b"PK\x03\x04", 0, content.rindex(b"archive/data.pkl"))
    assert at > 0
    data.write_bytes(content[:at] + saved([Runs(tmp_path / "ran")]))
    opened = open_checkpoint(checkpoint)
    assert torch.equal(opened.read("a.weight"), torch.arange(6.0).view(2, 3))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "float32.__class__"),
        ("megatronics", "Thing"),
        ("triaxis.models.interop.megatron.foreign_pickle", "Inert"),
        ("collections", "OrderedDict.__init__"),
    ],
)
def test_a_name_that_is_not_on_the_list_is_refused(module, name):
    content = (
        b"\x80\x04\x8c"
        + bytes([len(module)])
        + module.encode()
        + b"\x8c"
        + bytes([len(name)])
        + name.encode()
        + b"\x93."
    )
    with pytest.raises(CheckpointError) as refused:
        read_pickle(content, [("argparse", "Namespace")], "megatron.", "a file")
    assert f"a file refers to {module}.{name}" in str(refused.value)


def test_an_extension_code_is_refused():
    """Opcode EXT1 looks a class up in copyreg's registry, past the name."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_pickle(b"\x80\x04\x82\x01.", [], "", "a file")


def test_a_class_on_the_list_is_a_record_and_not_the_class():
    value = read_pickle(pickle.dumps(Namespace(a=1, b=[2])), [("argparse", "Namespace")], "", "a file")
    assert isinstance(value, Inert) and not isinstance(value, Namespace)
    assert value.origin == "argparse.Namespace"
    assert (value.state, value.get("a"), value.get("c", 3)) == ({"a": 1, "b": [2]}, 1, 3)


class Attribute:
    """Pickled as `getattr(owner, name)`: what Python 3.11.0 to 3.11.3 writes for a member of an enumeration."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enumeration_is_a_record_however_it_was_written(protocol):
    """Protocol 2, torch.save's, calls the module of getattr by its name of Python 2."""
    content = pickle.dumps(Attribute(Namespace, "some_member"), protocol)
    value = read_pickle(content, [("argparse", "Namespace")], "", "a file")
    assert isinstance(value, Inert) and value.arguments == ("some_member",)


@pytest.mark.parametrize("owner", [OrderedDict, "a text", torch.Size([1])], ids=repr)
def test_attributes_of_anything_else_are_refused(owner):
    with pytest.raises(CheckpointError, match="is no class of Megatron-Core"):
        read_pickle(pickle.dumps(Attribute(owner, "__class__")), [("argparse", "Namespace")], "", "a file")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_an_archive_are_read_as_they_were_saved(dtype):
    values = torch.arange(12).view(3, 4).to(dtype)
    held = {"whole": values, "column": values[:, 1], "turned": values.t(), "empty": values[:0], "one": values[1, 2]}
    read = read_archive(saved(OrderedDict(held)), (), "", "a file")
    for name, tensor in held.items():
        assert read[name].dtype == dtype
        assert torch.equal(read[name], tensor), name


def test_a_tensor_that_reaches_beyond_its_bytes_is_refused(tmp_path):
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.arange(4.0)))) as good, zipfile.ZipFile(stream, "w") as bad:
        for name in good.namelist():
            content = good.read(name)
            # The size 4 of the tensor is BININT1 4 inside a tuple; the storage keeps its 4 elements.
            bad.writestr(name, content.replace(b"K\x04\x85", b"K\x09\x85") if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_archive(stream.getvalue(), (), "", "a file")


def test_damage_is_an_error_and_not_a_traceback(checkpoint):
    metadata = checkpoint / ".metadata"
    content = metadata.read_bytes()
    for damaged in (b"", content[:-40], content.replace(b"relative_path", b"relative_math")):
        metadata.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            open_checkpoint(checkpoint)
    metadata.write_bytes(content)
    data = checkpoint / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(bytes(len(whole)))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp .*a.weight.* is not a torch.save archive"):
        open_checkpoint(checkpoint).read("a.weight")
    data.write_bytes(whole[:200])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp has 200 bytes, and chunks of a.weight .* reach beyond"):
        open_checkpoint(checkpoint)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"No such file.*Copy the whole folder"):
        open_checkpoint(checkpoint).read("a.weight")


def test_a_file_outside_of_the_folder_is_not_read(checkpoint):
    metadata = checkpoint / ".metadata"
    content = metadata.read_bytes()
    assert content.count(b"__0_0.distcp") == 1
    metadata.write_bytes(content.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(CheckpointError, match="secret"):
        open_checkpoint(checkpoint)


def _packed(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_an_archive_that_unpacks_to_more_than_it_has_is_refused():
    compressed = _packed({"a/data.pkl": pickle.dumps(bytes(10**7))}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"compressed, which torch\.save never does"):
        read_archive(compressed, (), "", "a file")
    stored = _packed({"a/data.pkl": pickle.dumps(7), "a/data/0": b"1234"})
    # The size of the last entry in the directory at the archive's end: 4 becomes 2^31.
    at = stored.rindex(b"PK\x01\x02") + 24
    with pytest.raises(CheckpointError, match=r"its entries claim 2,147,483,\d+ bytes"):
        read_archive(stored[:at] + (2**31).to_bytes(4, "little") + stored[at + 4 :], (), "", "a file")


def test_a_tensor_of_more_elements_than_its_storage_is_refused():
    with pytest.raises(CheckpointError, match=r"1,?000,?000,?000,?000 elements from 1 in its storage"):
        read_archive(saved(torch.ones(1).expand(10**6, 10**6)), (), "", "a file")


def test_a_pickle_that_numbers_an_object_beyond_its_length_is_refused():
    """Python would make a table of 2^29 entries, 4 GiB, for this one object."""
    with pytest.raises(CheckpointError, match="object number 268,435,456 in 8 bytes"):
        read_pickle(b"N" + b"r" + (2**28).to_bytes(4, "little") + b"." + b"x", [], "", "a file")


SHARED = b")\x94" + b"".join(b"h" + bytes([number]) + b"\x86\x94" for number in range(60))
"""Opcodes of a tuple that holds another one twice, which holds another one twice, ...: 2^60 values for who follows each."""


@pytest.mark.parametrize(
    "opcodes",
    [
        b"}" + SHARED + b"K\x01s",
        b"}(" + SHARED + b"K\x01u",
        b"(" + SHARED + b"K\x01d",
        b"\x8f(" + SHARED + b"\x90",
        b"(" + SHARED + b"\x91",
        b"cbuiltins\nset\n](" + SHARED + b"e\x85R",
        b"ccollections\nOrderedDict\n](" + SHARED + b"K\x01\x86e\x85R",
        b"(cbuiltins\nset\n](" + SHARED + b"eo",
        b"(](" + SHARED + b"eibuiltins\nset\n",
    ],
    ids=["SETITEM", "SETITEMS", "DICT", "ADDITEMS", "FROZENSET", "set", "OrderedDict", "OBJ", "INST"],
)
def test_keys_that_share_their_parts_are_refused_before_they_are_hashed(opcodes: bytes) -> None:
    with pytest.raises(CheckpointError, match="its keys are tuples that share parts"):
        read_pickle(b"\x80\x04" + opcodes + b".", [], "", "metadata")


def test_keys_of_many_parts_are_read() -> None:
    keys = {(name, (0, number), frozenset({number})): number for number in range(2000) for name in ("weight", "bias")}
    for protocol in range(2, 6):
        named = {(*key[:2],): value for key, value in keys.items()} if protocol < 4 else keys
        assert read_pickle(pickle.dumps(named, protocol), [], "", "metadata") == named


def test_a_layout_that_is_a_list_of_lists_is_refused():
    """Thirty lists, each twice in the next, have a text of gigabytes."""
    nested: Any = []
    for _ in range(30):
        nested = [nested, nested]
    content = pickle.dumps(nested, 4)[2:-1]
    head = b"\x80\x04ctorch.serialization\n_get_layout\n"
    with pytest.raises(CheckpointError, match="where the name of a layout belongs"):
        read_pickle(head + content + b"\x85R.", [], "", "a file")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"length": 2**62}, "reach beyond them .a chunk of 4611686018427387904 bytes"),
        ({"length": 1}, "needs 24 bytes and has 1"),
        ({"length": -1}, r"the place of a chunk of a.weight is \("),
        ({"offset": [[0]]}, r"the place of a chunk of a.weight is \("),
        ({"offset": 10**10_000}, r"an integer of 33,\d+ bits"),
        ({"relative_path": ["a"]}, "argument should be|expected str"),
        ({"relative_path": "a\0b"}, "a.weight is in 'a.*b'"),
    ],
)
def test_an_absurd_place_of_a_chunk_is_refused_before_anything_is_made(checkpoint, change, said):
    metadata = checkpoint / ".metadata"
    record = pickle.loads(metadata.read_bytes())
    for index, place in record.storage_data.items():
        if index.fqn == "a.weight":
            vars(place).update(change)
    metadata.write_bytes(pickle.dumps(record))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((2**50, 3), "6 of 3,377,699,720,527,872 elements"),
        ([[2]], r"the shape of a.weight is \["),
        ((2.0, 3), r"the shape of a.weight is \("),
    ],
)
def test_an_absurd_shape_is_refused_before_anything_is_made(checkpoint, size, said):
    metadata = checkpoint / ".metadata"
    record = pickle.loads(metadata.read_bytes())
    vars(record.state_dict_metadata["a.weight"])["size"] = size
    metadata.write_bytes(pickle.dumps(record))
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(checkpoint).read("a.weight")


@pytest.mark.parametrize("text", ["7" * 10_000, "iter" * 5_000, "\0", "7" * 64])
def test_an_absurd_tracker_is_refused(checkpoint, text):
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt says"):
        open_checkpoint(checkpoint.parent)


@pytest.mark.parametrize("backend", ["[]", "{}", '"\\u0000"', "1e400", "[" * 10_000])
def test_a_backend_that_is_no_name_is_refused(checkpoint, backend):
    (checkpoint / "metadata.json").write_text(f'{{"sharded_backend": {backend}}}')
    with pytest.raises(CheckpointError, match=r"is stored by the backend|does not say how the checkpoint is stored"):
        open_checkpoint(checkpoint)


def test_a_sparse_file_of_terabytes_is_not_read(checkpoint):
    os.truncate(checkpoint / "common.pt", 2**42)
    with pytest.raises(CheckpointError, match="4,398,046,511,104 bytes, and at most"):
        open_checkpoint(checkpoint)
