"""Checks that gradient cases detect wrong gradient rules.

Each rule is mutated to return 1.01 times its gradients, of all inputs and of each input alone. Every case
of the rule must fail, and for each input some case must fail. Then each emitted addition and subtraction
loses one of its operands, and some case must fail.

    python scripts/mutate_rules.py              all rules; exits with 1 if a mutation is undetected
    python scripts/mutate_rules.py Conv Gemm    these rules only
"""

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Mutates the rules of the command line; returns the exit code."""
    sys.path.insert(0, str(REPOSITORY))
    from onnxgc.gradients.registry import RULES
    from tests.gradients.gradient_cases import cases_of
    from tests.gradients.mutations import given_inputs, unnoticed, unnoticed_terms

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help="a key of RULES (default: all)")
    rules = parser.parse_args().rules or list(RULES)
    if unknown := sorted(set(rules) - set(RULES)):
        parser.error(f"unknown rules: {', '.join(unknown)}")
    failed: list[str] = []
    for rule in rules:
        cases = cases_of(rule)
        found = [*unnoticed(rule, cases), *unnoticed_terms(rule, cases)]
        inputs = ", ".join(map(str, given_inputs(rule, cases)))
        verdict = "UNDETECTED" if found else "detected"
        print(f"{rule}: {len(cases)} cases, inputs {inputs}: {verdict}", flush=True)
        for reason in found:
            print(f"    {reason}")
        if found:
            failed.append(rule)
    print(f"rules with undetected mutations: {', '.join(failed) or 'none'} of {len(rules)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
