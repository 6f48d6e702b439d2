"""The model of one link, tried in so many random runs; a few broken links, to see that it bites."""

import pytest

from laminar.net.session import Inbox, Outbox
from tools.check.rows.session_model import LossyLink, LossyLinkWithoutRecord, run_model

EXAMPLES, STEPS = 80, 50


@pytest.mark.parametrize("model", [LossyLink, LossyLinkWithoutRecord])
def test_lossy_link(model):
    run_model(model, EXAMPLES, STEPS, number=1)


def delivers_duplicates(patch):
    def planted(self, seq):
        self.delivered = max(self.delivered, seq)
        return True

    patch.setattr(Inbox, "accept_number", planted)


def never_resends(patch):
    patch.setattr(Outbox, "is_ack_overdue", lambda self, now_ns: False)


def takes_more_than_it_may_keep(patch):
    append = Outbox.append

    def planted(self, body):
        limits, self._limits = self._limits, type(self._limits)()
        try:
            return append(self, body)
        finally:
            self._limits = limits

    patch.setattr(Outbox, "append", planted)


@pytest.mark.parametrize("plant", [delivers_duplicates, never_resends, takes_more_than_it_may_keep])
def test_broken_link_is_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        run_model(LossyLink, EXAMPLES, STEPS, number=1, shrink=False)
