"""Prints contexts with questions as the JSON lines that `evicpress bench serve` reads.

python -m evicbench.testbed.contexts --contexts 60 --tokens 2000,3000,4000 --questions 12 --seed 6
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence

from evicbench.testbed.tasks import FAMILIES, MIN_CONTEXT_TOKENS, ONE_QUESTION, Context, make_context

FEW_FACTS = ("needle", "redundant", "mapping")
"""Families that state four facts (labels, for `mapping`) where nobody asks for more."""


def generate(
    num_contexts: int, tokens: Sequence[int], num_questions: int, seed: int, families: Sequence[str]
) -> Iterator[Context]:
    """Families and lengths take turns, so that every family comes in every length; the same for the same arguments.

    Each context has ``num_questions`` questions. Raises ValueError for a context that cannot have as many.
    """
    for number in range(num_contexts):
        family = families[number % len(families)]
        length = tokens[number // len(families) % len(tokens)]
        draw = random.Random(f"contexts {seed} {number} {family} {length}")
        context = make_context(family, length, draw, num_questions if family in FEW_FACTS else None)
        if len(context.questions) < num_questions:
            raise ValueError(
                f"a context of family {family} and {length} tokens has {len(context.questions)} questions: expected "
                f"{num_questions}, so leave the family out or ask less"
            )
        yield context


def line(context: Context, num_questions: int) -> str:
    """``tokens`` counts the <bos> that the chat template writes."""
    questions = [{"question": each.text, "answer": each.answer} for each in context.questions[:num_questions]]
    given = {"context": context.text, "questions": questions, "family": context.family, "tokens": len(context.tokens)}
    return json.dumps(given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--contexts", type=int, required=True, metavar="N")
    add("--tokens", required=True, metavar="T[,T2,...]", help="of a context, <bos> counted; lengths take turns")
    add("--questions", type=int, required=True, metavar="Q", help="about each context")
    add("--seed", type=int, default=0, metavar="S")
    usual = ",".join(family for family in FAMILIES if family not in ONE_QUESTION)
    add("--families", default=usual, metavar="NAMES", help="separated by commas; default %(default)s")
    args = parser.parse_args()
    families = args.families.split(",")
    try:
        tokens = [int(part) for part in args.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens {args.tokens!r}: expected whole numbers separated by commas")
    if unknown := [family for family in families if family not in FAMILIES]:
        parser.error(f"--families has {unknown[0]!r}: expected some of {', '.join(FAMILIES)}")
    if min(tokens) < MIN_CONTEXT_TOKENS or args.contexts < 1 or args.questions < 1:
        parser.error(f"expected at least 1 context, 1 question and {MIN_CONTEXT_TOKENS} tokens")
    try:
        for context in generate(args.contexts, tokens, args.questions, args.seed, families):
            print(line(context, args.questions))
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
