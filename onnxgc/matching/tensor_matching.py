"""Tensors of two networks that hold one value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onnxgc.matching.graph_helpers import grouped
from onnxgc.matching.network_view import NetworkView, Pair, full_key, key_ignoring_layout, key_ignoring_scale
from onnxgc.matching.normal_form.entities import View


@dataclass(frozen=True, slots=True)
class TensorPairs:
    """Pairs tensors of matched values. `uses_a` and `uses_b` are digests of the uses of each tensor."""

    a: NetworkView
    b: NetworkView
    uses_a: Mapping[str, str]
    uses_b: Mapping[str, str]

    def pairs_of(self, here: Sequence[str], there: Sequence[str]) -> list[Pair]:
        """Pairs of the tensors of a value: by equal keys, then without layout, then without scale."""
        pairs: list[Pair] = []
        views_a, views_b = self.a.structure.views, self.b.structure.views
        rest_a, rest_b = list(here), list(there)
        for key_of in (full_key, key_ignoring_layout, key_ignoring_scale):
            groups_a = grouped((key_of(views_a[name]), name) for name in here)
            groups_b = grouped((key_of(views_b[name]), name) for name in there)
            for key, names in groups_a.items():
                for name, other in self._disambiguated(names, groups_b.get(key, [])):
                    if name in rest_a or other in rest_b:
                        pairs.append(_pair(name, other, views_a[name], views_b[other]))
            # A weaker key does not resolve an ambiguity.
            rest_a = [name for name in rest_a if key_of(views_a[name]) not in groups_b]
            rest_b = [name for name in rest_b if key_of(views_b[name]) not in groups_a]
        return pairs

    def _disambiguated(self, names: Sequence[str], others: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs of tensors with equal keys. Their uses decide if both sides have several.

        Rearrangements of one tensor are one candidate.
        """
        if not names or not others:
            return []
        if min(len(set(map(self.a.root_of, names))), len(set(map(self.b.root_of, others)))) == 1:
            count = max(len(names), len(others))
            return [(names[min(i, len(names) - 1)], others[min(i, len(others) - 1)]) for i in range(count)]
        by_use_a = grouped((self.uses_a[name], name) for name in names)
        by_use_b = grouped((self.uses_b[name], name) for name in others)
        return [
            (name, other)
            for use, group in by_use_a.items()
            if min(len(group), len(by_use_b.get(use, []))) == 1
            for name in group
            for other in by_use_b[use]
        ]


def _pair(name: str, other: str, one: View, two: View) -> Pair:
    is_rearranged = full_key(replace(one, scale=1.0)) != full_key(replace(two, scale=1.0))
    factor = two.scale / one.scale
    return Pair(name, other, is_rearranged, 1.0 if math.isclose(factor, 1.0, rel_tol=1e-5) else factor)
