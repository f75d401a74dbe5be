"""lm-eval's own command line, with the model "evictbench" registered: `evictbench-lm-eval --model evictbench ...`."""

from __future__ import annotations

import sys


def register() -> None:
    """Tell lm-eval where the model is; nothing is loaded before it is asked for."""
    import lm_eval.models  # noqa: F401 (lm-eval registers its own models only while no other is)
    from lm_eval.api.registry import model_registry

    if "evictbench" not in model_registry:
        model_registry.register("evictbench", target="evictbench.harness.model:EvictBenchLM")


def main() -> None:
    """Run lm-eval with the arguments of this process; bad input ends in a sentence and exit code 2."""
    from lm_eval.__main__ import cli_evaluate

    from evictbench.errors import UserError

    register()
    try:
        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
