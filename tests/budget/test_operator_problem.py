import pytest

from onnxgc.budget.operator_problem import OperatorProblem, ProblemOperator, simulate_sequence
from onnxgc.errors import GraphFileError

MAKE = ProblemOperator("make", (), (0,), 1)


def test_a_copy_is_live_from_its_run_to_its_last_reader() -> None:
    problem = OperatorProblem(
        (MAKE, ProblemOperator("use", (0,), (1,), 2, workspace=3), ProblemOperator("end", (0, 1), (2,), 4)),
        (10, 5, 1),
        frozenset({2}),
    )
    assert simulate_sequence(problem, [0, 1, 2]).timeline == (10, 18, 16)
    profile = simulate_sequence(problem, [0, 1, 0, 2, 1])
    assert profile.timeline == (10, 18, 15, 16, 19), "the last run reads the second copy too"
    assert (profile.duration, profile.peak) == (10, 19)


def test_an_operator_in_place_reuses_memory_where_the_inputs_lifetime_ends() -> None:
    problem = OperatorProblem(
        (MAKE, ProblemOperator("over", (0,), (1,), 1, in_place=0), ProblemOperator("again", (0,), (2,), 1, in_place=0)),
        (10, 10, 10),
    )
    assert simulate_sequence(problem, [0, 1, 2]).timeline == (10, 20, 10)
    assert simulate_sequence(problem, [0, 1, 0, 2]).timeline == (10, 10, 10, 10)


def test_trailing_outputs_are_omitted_where_nothing_reads_them() -> None:
    problem = OperatorProblem(
        (ProblemOperator("three", (), (0, 1, 2), 1, min_writes=1), ProblemOperator("use", (2,), (3,), 1)),
        (1, 10, 100, 0),
        frozenset({0}),
    )
    assert simulate_sequence(problem, [0, 1]).timeline == (111, 101)
    assert simulate_sequence(problem, [0, 0, 1, 0]).timeline == (1, 111, 100, 1)


def test_the_latest_copy_of_a_kept_storage_is_live_to_the_end() -> None:
    problem = OperatorProblem((MAKE, ProblemOperator("other", (), (1,), 1)), (10, 1), frozenset({0}))
    assert simulate_sequence(problem, [0, 1]).timeline == (10, 11)
    assert simulate_sequence(problem, [0, 1, 0]).timeline == (10, 1, 10)


@pytest.mark.parametrize(
    "operators, sizes, message",
    [
        ((ProblemOperator("a", (0,), (1,), 1),), (1, 1), "'a' reads a storage that no earlier operator writes"),
        ((MAKE, ProblemOperator("a", (), (0,), 1)), (1,), "'a' writes a storage that another operator writes"),
        ((MAKE,), (1, 1), "no operator writes storage 1"),
        ((ProblemOperator("a", (), (0,), -1),), (1,), "'a' has a negative duration"),
        ((MAKE,), (-1,), "a size is negative"),
        (
            (MAKE, ProblemOperator("a", (), (1,), 1, in_place=0)),
            (1, 1),
            "'a' works in place on a storage that it does not",
        ),
        ((MAKE, ProblemOperator("a", (0,), (1,), 1, in_place=0)), (1, 2), "another size"),
    ],
)
def test_malformed_problems_raise(operators: tuple[ProblemOperator, ...], sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(GraphFileError, match=message):
        OperatorProblem(operators, sizes)


@pytest.mark.parametrize(
    "sequence, message",
    [
        ([1, 0], "'once' runs before its inputs at step 0"),
        ([0, 1, 1], "'once' must not run twice"),
        ([0], "'once' never runs"),
    ],
)
def test_invalid_sequences_raise(sequence: list[int], message: str) -> None:
    problem = OperatorProblem((MAKE, ProblemOperator("once", (0,), (1,), 1, may_repeat=False)), (1, 1))
    with pytest.raises(ValueError, match=message):
        simulate_sequence(problem, sequence)
