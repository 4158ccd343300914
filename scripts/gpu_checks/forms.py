"""Other forms of the weight gradient of convolution than those that are fastest on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from onnxgc.gradients import convolution
from onnxgc.gradients.convolution import WeightForm

Forms = tuple[WeightForm, ...]


def _whole(forms: Forms) -> Forms:
    """Each over the whole batch at once: a part costs the start of its kernels again."""
    return tuple(replace(form, most_parts=lambda c: 1) for form in forms)


def _exchanged(forms: Forms) -> Forms:
    """Convolution of x by dy wherever a kernel has more than one element and there are no groups."""
    exchanged = next(form for form in forms if form.name == "exchanged")
    everywhere = replace(exchanged, applies=lambda c: c.groups == 1 and not c.is_pointwise)
    return (everywhere, *(form for form in forms if form is not exchanged))


VARIANTS: dict[str, Callable[[Forms], Forms]] = {
    "cpu": lambda forms: forms,
    "whole batch": _whole,
    "exchanged, whole batch": lambda forms: _whole(_exchanged(forms)),
}


@contextmanager
def forms_of(variant: str) -> Iterator[None]:
    """Within it, models are differentiated with these forms."""
    chosen = {"cpu": VARIANTS[variant](convolution.WEIGHT_FORMS["cpu"])}
    with mock.patch.object(convolution, "WEIGHT_FORMS", chosen):
        yield
