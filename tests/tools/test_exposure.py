"""The search of row 26 finds a secret that was written somewhere."""

from __future__ import annotations

import base64

from laminar.run.secret import SECRET_BYTES, Secret
from tools.check.rows.exposure import forms_of, hits

CONTENT = bytes(range(200, 200 + SECRET_BYTES))
SECRET = Secret(CONTENT)


def test_the_secret_and_its_keys_are_found_as_they_may_be_written() -> None:
    forms = forms_of(SECRET, CONTENT)
    places = {
        "events": b"before" + CONTENT + b"after",
        "log": f'{{"key": "{SECRET.derive_key("bulk").hex()}"}}'.encode(),
        "wandb": base64.b64encode(SECRET.derive_key("curve-server")),
        "output": f"keys are {SECRET.derive_key('curve-client')!r}".encode(),
        "status": SECRET.run_id.encode(),
        "other": Secret(b"another run").derive_key("bulk").hex().encode(),
    }
    assert sorted(hits(forms, places)) == [
        "events: secret as bytes",
        "log: bulk as hex",
        "output: curve-client as Python shows it",
        "wandb: curve-server as base64",
        *(
            ["wandb: curve-server as base64 for addresses"]
            * _same(SECRET.derive_key("curve-server"))
        ),
    ]


def _same(key: bytes) -> bool:
    """Whether both alphabets write it alike."""
    return base64.b64encode(key) == base64.urlsafe_b64encode(key)
