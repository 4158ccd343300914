"""Training files of the networks, made beforehand or when needed, and their feeds by seed.

A file has no weights: parameters and statistics are inputs, whose values are drawn on the device's machine.
"""

import functools
import hashlib
import json
import lzma
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from onnxgc.model.core.ir import Array
from scripts.gpu_checks.settings import (
    ROOT,
    SEED,
    SEQUENCES,
    SMOKE_NETWORKS,
    SMOKE_SEQUENCES,
    TABLE1_NETWORKS,
    CheckError,
    Network,
    Sequences,
)

BASELINE, PLANNED = "regular", "planned"
GRAPHS = (BASELINE, PLANNED)
BUDGETS = ("80%", "60%", "min")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A forward model and its training files: the baseline and one plan, or one for each budget."""

    source: Network | Sequences
    forms: str = "cuda"
    budgets: tuple[str, ...] = ()
    compute_type: str = "float32"
    has_barriers: bool = True

    @property
    def name(self) -> str:
        kinds = [self.forms, *(["budgets"] if self.budgets else [])]
        kinds += [self.compute_type] if self.compute_type != "float32" else []
        kinds += [] if self.has_barriers else ["no-barriers"]
        return "-".join([self.source.name, *kinds])

    def is_prepared(self, folder: Path) -> bool:
        """Whether a folder has its files, of this version of the package."""
        try:
            TrainingFiles.load(folder, self.name)
        except CheckError:
            return False
        return True

    @property
    def graphs(self) -> tuple[str, ...]:
        return (BASELINE, *self.budgets) if self.budgets else GRAPHS


def recipes(group: str, smoke: bool) -> tuple[Recipe, ...]:
    """The training files of a group."""
    table1 = SMOKE_NETWORKS if smoke else TABLE1_NETWORKS
    networks, sequences = table1[: 1 if smoke else 5], SMOKE_SEQUENCES if smoke else SEQUENCES
    budgets = tuple(Recipe(one, budgets=BUDGETS[1:2] if smoke else BUDGETS) for one in networks[:2])
    half = Recipe(networks[0], compute_type="float16"), Recipe(sequences[0], compute_type="bfloat16")
    found: dict[str, tuple[Recipe, ...]] = {
        "kernels": (*map(Recipe, networks), Recipe(networks[0], "cpu")),
        "steps": (
            *map(Recipe, table1),
            *(Recipe(network, "cpu") for network in networks),
            Recipe(networks[0], has_barriers=False),
        ),
        "transformers": tuple(map(Recipe, sequences)),
        "training": (*budgets, *half),
    }
    return found.get(group, ())


@dataclass(frozen=True, slots=True)
class TrainingFiles:
    """The files of one recipe in a folder.

    `ranges` has the lowest and the highest value of each input without a value in the file, `simulated` the
    simulated peak of each graph in bytes.
    """

    folder: Path
    name: str
    loss: str
    ranges: Mapping[str, tuple[float, float]]
    simulated: Mapping[str, int]
    sizes: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path, name: str) -> "TrainingFiles":
        """The files of a recipe.

        Raises:
            CheckError: they are missing, or were made by other sources of the package.
        """
        path = archive_of(folder, name)
        if not path.exists():
            raise CheckError(f"{folder} has no files of '{name}'; make them by --prepare {folder}")
        with lzma.open(path) as archive:
            stored = json.loads(archive.readline())
        if stored.pop("version") != package_version():
            raise CheckError(f"'{name}' in {folder} belongs to other sources; make it again by --prepare")
        return cls(folder, name, **stored)

    def model(self, graph: str) -> onnx.ModelProto:
        with lzma.open(archive_of(self.folder, self.name)) as archive:
            archive.readline()
            contents = {name: archive.read(size) for name, size in self.sizes.items()}
        return onnx.load_model_from_string(contents[graph])

    def feeds(self, model: onnx.ModelProto) -> dict[str, Array]:
        """Uniform values within the range of each input, the same for all files with its name."""
        fed = (value for value in model.graph.input if value.name in self.ranges)
        return {value.name: _drawn(value, *self.ranges[value.name]) for value in fed}


def archive_of(folder: Path, name: str) -> Path:
    """One file: a line of JSON that describes the training files, and their contents."""
    return folder / f"{name}.xz"


@functools.cache
def package_version() -> str:
    """A digest of all sources that decide the content of training files."""
    digest = hashlib.sha256()
    names = ("half_precision", "preparation", "settings", "training_files")
    own = [Path(__file__).with_name(f"{name}.py") for name in names]
    package = (path for folder in ("onnxgc", "scripts/networks") for path in (ROOT / folder).rglob("*.py"))
    for path in (*sorted(package), *own):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _drawn(value: onnx.ValueInfoProto, low: float, high: float) -> Array:
    kind = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    shape = [dim.dim_value for dim in kind.shape.dim]
    generator = np.random.default_rng([SEED, zlib.crc32(value.name.encode())])
    if dtype.kind == "f":
        return (generator.random(shape, np.float32) * np.float32(high - low) + np.float32(low)).astype(dtype)
    return generator.integers(int(low), int(high), shape, endpoint=True).astype(dtype)
