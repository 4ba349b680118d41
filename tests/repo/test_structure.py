"""Structure of the repository: it keeps to every rule."""

import pytest

from tests.repo import rules
from tests.repo.source import ROOT


@pytest.mark.parametrize(
    "rule",
    [
        rules.upward_imports,
        rules.foreign_imports,
        rules.messages_inside,
        rules.client_imports,
        rules.early_flashinfer,
        rules.shared_test_modules,
        rules.long_functions,
        rules.code_from_outside,
        rules.unnamed_ideas,
    ],
)
def test_the_repository_keeps_to(rule) -> None:
    assert list(rule(ROOT)) == []


def test_no_folder_shows_more_entries_than_a_reader_takes_in() -> None:
    assert list(rules.full_folders(rules.tracked_files())) == []


def test_exceptions_are_few_and_have_a_reason() -> None:
    assert len(rules.LONG_FUNCTIONS) <= 5
    assert all(rules.LONG_FUNCTIONS.values())
