"""`python -m fake_command` is `evictbench`; FAKE_GENERATOR=1 fakes generation, HEAVY_LOG names a file for imports."""

import atexit
import json
import os
import sys

HEAVY = ("torch", "transformers", "lm_eval", "datasets", "pandas", "scipy", "matplotlib")


def note_imports():
    with open(os.environ["HEAVY_LOG"], "w") as file:
        json.dump([name for name in HEAVY if name in sys.modules], file)


if __name__ == "__main__":
    from evictbench.cli.app import main
    from evictbench.terminal import waiting

    waiting.EVERY = 1e6  # lines about waiting say how fast the machine is
    if "HEAVY_LOG" in os.environ:
        atexit.register(note_imports)
    if sys.argv[1] == "run" and os.environ.get("FAKE_GENERATOR") == "1":
        from fake_plugins import install_fake_generator

        install_fake_generator()
    main()
