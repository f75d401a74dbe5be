"""The 27 tasks of BIG-Bench Hard, and their names with either prompt. Data only."""

from __future__ import annotations

SUBJECTS = (
    "boolean_expressions",
    "causal_judgement",
    "date_understanding",
    "disambiguation_qa",
    "dyck_languages",
    "formal_fallacies",
    "geometric_shapes",
    "hyperbaton",
    "logical_deduction_five_objects",
    "logical_deduction_seven_objects",
    "logical_deduction_three_objects",
    "movie_recommendation",
    "multistep_arithmetic_two",
    "navigate",
    "object_counting",
    "penguins_in_a_table",
    "reasoning_about_colored_objects",
    "ruin_names",
    "salient_translation_error_detection",
    "snarks",
    "sports_understanding",
    "temporal_sequences",
    "tracking_shuffled_objects_five_objects",
    "tracking_shuffled_objects_seven_objects",
    "tracking_shuffled_objects_three_objects",
    "web_of_lies",
    "word_sorting",
)

DOCUMENTS = {"causal_judgement": 187, "penguins_in_a_table": 146, "snarks": 178}
"""Questions of the tasks that have not 250."""

COT = {f"bbh_{subject}": subject for subject in SUBJECTS}
"""Names of the tasks with three worked examples."""

DIRECT = {f"bbh_{subject}_direct": subject for subject in SUBJECTS}
"""Names of the tasks with three examples that give their answers only."""

SUBJECT_OF = COT | DIRECT
"""The name of every task to its subject."""

TRUTHS = {
    "boolean_expressions": ("True", "False"),
    "causal_judgement": ("Yes", "No"),
    "navigate": ("Yes", "No"),
    "sports_understanding": ("yes", "no"),
    "web_of_lies": ("Yes", "No"),
}
"""What a truth value in a file stands for: YAML reads a bare `No` or `False` as one."""
