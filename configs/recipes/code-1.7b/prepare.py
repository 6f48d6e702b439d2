"""Make train.jsonl (splits train and validation) and test.jsonl from MBPP."""

import sys
from pathlib import Path

from laminar.tasks.data.prepare import Row, prepare_files

MBPP = "hf://datasets/google-research-datasets/mbpp/full/{}-*.parquet"
PROMPT = """{text}
Your function must pass this test:
{test}
Write one Python code block, without tests."""


def convert(row: Row) -> Row:
    """Return the prompt, which shows one test for the name, the reference program and all tests."""
    prompt = PROMPT.format(text=row["text"].strip(), test=row["test_list"][0])
    tests = {"setup": row["test_setup_code"], "tests": row["test_list"]}
    code = row["code"].replace("\r\n", "\n")
    return {"data_source": "mbpp", "prompt": prompt, "answer": code, "extra_info": tests}


if __name__ == "__main__":
    splits = {"train.jsonl": ["train", "validation"], "test.jsonl": ["test"]}
    files = {file: [MBPP.format(name) for name in names] for file, names in splits.items()}
    sys.exit(prepare_files(Path(__file__).parent, files, convert))
