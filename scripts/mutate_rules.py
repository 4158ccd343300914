"""Check that the gradient cases notice a wrong gradient rule.

Each rule in turn gives 1.01 times its gradients, of all inputs and then of each one alone. Every
case of that rule must fail, and every input must make some case fail. Then each addition and
subtraction that the rule emits loses one of its operands, and some case must fail.

    python scripts/mutate_rules.py              all rules; exits with 1 if anything goes unnoticed
    python scripts/mutate_rules.py Conv Gemm    these rules only
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Mutate the rules named on the command line; returns the exit code."""
    sys.path.insert(0, str(REPOSITORY))
    from onnxgc.gradients.registry import RULES
    from tests.gradients.gradient_cases import cases_of
    from tests.gradients.mutations import given_inputs, unnoticed, unnoticed_terms

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help="a key of RULES; all without any")
    rules = parser.parse_args().rules or list(RULES)
    if unknown := sorted(set(rules) - set(RULES)):
        parser.error(f"no such rule: {', '.join(unknown)}")
    failed: list[str] = []
    for rule in rules:
        cases = cases_of(rule)
        found = [*unnoticed(rule, cases), *unnoticed_terms(rule, cases)]
        inputs = ", ".join(map(str, given_inputs(rule, cases)))
        print(
            f"{rule}: {len(cases)} cases, inputs {inputs}: {'UNNOTICED' if found else 'noticed'}", flush=True
        )
        for reason in found:
            print(f"    {reason}")
        if found:
            failed.append(rule)
    print(f"rules that may be wrong unnoticed: {', '.join(failed) or 'none'} of {len(rules)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
