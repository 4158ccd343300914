import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxgc.api import inspect
from onnxgc.emission.atomic_files import write_text
from onnxgc.errors import ModelFileError
from onnxgc.report.text.printable import MAX_NAME_LENGTH, printable
from scripts.hostile_files import BODIES, EXTERNAL, changed, doubling, external, named, network


def test_hostile_files_are_refused_in_one_line_or_accepted() -> None:
    command = [sys.executable, "-m", "scripts.hostile", "--count", "160", "--quick"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) >= 150


REFUSED: list[tuple[Callable[[Path], bytes], str]] = [
    (lambda folder: named("h", b"a\xff\xfeb"), "not UTF-8"),
    (lambda folder: named("h", b"x" * 100_000), "100000 characters"),
    (lambda folder: changed("weight_type", 999), "initializer 'w' has the unknown element type 999"),
    (lambda folder: changed("weight_dim", -1), "initializer 'w' has the negative dimension -1"),
    (lambda folder: changed("weight_dim", 2**62), "initializer 'w' has"),
    (lambda folder: changed("weight_dim", 2), "initializer 'w' of shape [2, 4] has"),
    (lambda folder: changed("input_type", 999), "tensor 'x' has the unknown element type 999"),
    (lambda folder: changed("opset", 10**9), "opset 1000000000 of domain ''"),
    (lambda folder: doubling(40), "nodes with those of its functions"),
    (lambda folder: doubling(2, is_recursive=True), "calls itself"),
    *(
        (lambda folder, body=body: network(BODIES[body]).SerializeToString(), text)
        for body, text in {
            "groups_0": "attribute 'num_groups' of node 'c' (GroupNormalization) is 0",
            "cast_999": "attribute 'to' of node 'c' (Cast) is the unknown element type 999",
            "split_2_40": "attribute 'num_outputs' of node 'c' (Split) is 1099511627776",
            "pad_evil": "attribute 'mode' of node 'c' (Pad) is not one of",
            "fill_negative": "'c' has the shape [-5]",
            "twice": "tensor 'y' has two sources",
            "cycle": "depends on its own output",
        }.items()
    ),
    *(
        (lambda folder, key=key: external(folder, **EXTERNAL[key]).SerializeToString(), text)
        for key, text in {
            "passwd": "'/etc/passwd', by its path",
            "parent": "a link outside of the model's folder",
            "folder": "not a regular file",
            "offset_negative": "the offset of initializer 'w'",
            "offset_2_70": "the offset of initializer 'w'",
            "offset_behind": "that file has 48 bytes",
            "length_short": "have 4 bytes in place of 48",
            "nul": "no valid file name",
        }.items()
    ),
]


@pytest.mark.parametrize("make, text", REFUSED)
def test_an_error_names_the_element(make: Callable[[Path], bytes], text: str, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(make(tmp_path))
    with pytest.raises(ModelFileError) as caught:
        inspect(path)
    assert text in str(caught.value)


@pytest.mark.parametrize("body, text", [("loop_10_9", "1000000000 steps"), ("loop_endless", "never ends")])
def test_an_endless_loop_is_an_obstacle(body: str, text: str) -> None:
    assert text in inspect(network(BODIES[body])).obstacles[0]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("a\x1b[31m\x00\x07\x9b", "a\\x1b[31m\\x00\\x07\\x9b"),
        ("a\u202eb\u2028c\u2066", "a\\u202eb\\u2028c\\u2066"),
        ("größe 層\u00a0x\n", "größe 層\u00a0x\n"),
        ("'" + "x" * 1000 + "' is long", "'" + "x" * 97 + "..." + "x" * 20 + "' is long"),
        ("x" * MAX_NAME_LENGTH, "x" * MAX_NAME_LENGTH),
    ],
)
def test_texts_are_printed_safely(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_the_next_run_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    target, other = tmp_path / "a.txt", tmp_path / ".onnxgc-of-another-target"
    other.mkdir()
    code = (
        "import os, sys; from onnxgc.emission.atomic_files import write_text; os.replace = lambda *_: os._exit(9);"
        "write_text('half', sys.argv[1])"
    )
    assert subprocess.run([sys.executable, "-c", code, str(target)]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    write_text("whole", target)
    assert sorted(tmp_path.iterdir()) == sorted([other, target])
