"""`python -m benchmarks.equality_with_lm_eval --data-dir DIR`: with the full cache, our runs give the greedy outputs of
lm-eval's own Hugging Face model, on the same prompts, limits and stop strings. One row, float32."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "ruler": {"suite": "ruler", "tasks": "niah_single_1,niah_multikey_1,vt,fwe", "context": 1024, "each": 5},
    "gsm8k cot8": {"suite": "gsm8k", "protocol": "cot8", "each": 20},
    "bbh": {
        "suite": "bbh",
        "tasks": "bbh_boolean_expressions,bbh_navigate,bbh_object_counting,bbh_word_sorting",
        "each": 5,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality_with_lm_eval", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True, help="folder with gsm8k/ and bbh/")
    parser.add_argument("--most", type=int, default=128, help="new tokens at most, for both")
    parser.add_argument("--only", help="one of: " + ", ".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/out/equality.json"))
    options = parser.parse_args()

    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from evictbench.evaluation.plan import make_plan
    from evictbench.evaluation.settings import RunSettings
    from evictbench.generation.generator import Generator, Request
    from evictbench.models.load import load_model

    report: dict[str, Any] = {}
    for name, case in CASES.items():
        if options.only and options.only != name:
            continue
        chosen = {key: value for key, value in case.items() if key != "each"}
        plan = make_plan(
            RunSettings(policy="full", limit=case["each"], data_dir=options.data_dir, device="cpu", **chosen)
        )
        model = load_model(plan.source, "cpu", "float32")
        theirs = HFLM(pretrained=model, tokenizer=plan.tokenizer, batch_size=1, max_length=8192)
        texts, answers = [], []
        for planned in plan.prompts:
            limit = min(planned.max_new_tokens, options.most)
            text = plan.tokenizer.decode(list(planned.prompt.ids), skip_special_tokens=False)
            assert theirs.tok_encode(text) == list(planned.prompt.ids), "the same prompt, token by token"
            texts.append((planned, limit))
            arguments = (text, {"until": list(planned.prompt.stop), "max_gen_toks": limit, "do_sample": False})
            instance = Instance("generate_until", {}, arguments, 0, (name, 0, 1))
            answers.append(theirs.generate_until([instance], disable_tqdm=True)[0])
        requests = [
            Request(index, tuple(planned.prompt.ids), None, limit, planned.prompt.stop)
            for index, (planned, limit) in enumerate(texts)
        ]
        generator = Generator(model, plan.tokenizer, plan.policy, None, batch_size=1)
        ours = {completion.key: completion.text for completion in generator.run(requests)}
        differing = [index for index, answer in enumerate(answers) if answer != ours[index]]
        report[name] = {"samples": len(answers), "equal": len(answers) - len(differing)}
        print(f"{name}: {len(answers) - len(differing)} of {len(answers)} outputs equal", flush=True)
        for index in differing:
            print(f"  {index}: theirs {answers[index][:80]!r}\n  {' ' * len(str(index))}  ours   {ours[index][:80]!r}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
