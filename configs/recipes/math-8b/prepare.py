"""Make train.jsonl and test.jsonl from GSM8K and MATH, which have different columns."""

import sys
from pathlib import Path

from laminar.tasks.data.prepare import Row, prepare_files

GSM8K = "hf://datasets/openai/gsm8k/main/{}-*.parquet"
MATH = "hf://datasets/DigitalLearningGmbH/MATH-lighteval/data/{}-*.parquet"
INSTRUCTION = "Think step by step and put the final answer within \\boxed{}."


def convert(row: Row) -> Row:
    """Return prompt and solution, which ends with #### (GSM8K) or has a \\boxed{} (MATH)."""
    name = "gsm8k" if "question" in row else "math"
    question, answer = ("question", "answer") if name == "gsm8k" else ("problem", "solution")
    prompt = f"{row[question]} {INSTRUCTION}"
    return {"data_source": name, "prompt": prompt, "answer": row[answer]}


if __name__ == "__main__":
    files = {f"{name}.jsonl": [GSM8K.format(name), MATH.format(name)] for name in ("train", "test")}
    sys.exit(prepare_files(Path(__file__).parent, files, convert))
