"""Forms of the weight gradient of convolutions, and all forms for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from onnxgc.gradients import weight_gradient
from onnxgc.gradients.weight_gradient import WeightForm

Forms = tuple[WeightForm, ...]


@contextmanager
def forms_of(variant: str) -> Iterator[None]:
    """A context in which models are differentiated with the forms of `VARIANTS[variant]`."""
    chosen = dict(weight_gradient.WEIGHT_FORMS, cpu=VARIANTS[variant](weight_gradient.WEIGHT_FORMS["cpu"]))
    with mock.patch.object(weight_gradient, "WEIGHT_FORMS", chosen):
        yield


def _whole_batch(forms: Forms) -> Forms:
    """Forms without division of the batch, since each part launches kernels."""
    return tuple(replace(form, parts=lambda g, c: 1) for form in forms)


def _exchanged(forms: Forms) -> Forms:
    """Convolution of x by dy for all ungrouped kernels of more than one element."""
    exchanged = next(form for form in forms if form.name == "exchanged")
    everywhere = replace(exchanged, applies=lambda c: c.groups == 1 and not c.is_pointwise)
    return (everywhere, *(form for form in forms if form is not exchanged))


VARIANTS: dict[str, Callable[[Forms], Forms]] = {
    "cpu": lambda forms: forms,
    "whole batch": _whole_batch,
    "exchanged, whole batch": lambda forms: _whole_batch(_exchanged(forms)),
    "cuda": lambda forms: forms,
}
