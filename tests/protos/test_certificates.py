"""Expired certificates are what ends most services behind mutual TLS: they must be announced."""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from protos.transport.certificates import validities
from protos.transport.credentials import WatchedTls, first_to_expire
from tests.support.certificates import Authority

NOW = datetime.now(UTC).replace(microsecond=0)
DAY = timedelta(days=1)


def test_dates_are_those_that_a_library_reads(tmp_path: Path):
    authority = Authority(tmp_path)
    years = [timedelta(0), 3650 * DAY, 20_000 * DAY]  # the last beyond 2049, in another form
    files = [
        authority.issue(f"c{number}", "a.test", not_before=NOW - DAY, not_after=NOW + end)
        for number, end in enumerate(years)
    ]
    pem = b"# a comment\n" + b"".join(each.cert.read_bytes() for each in files if each.cert)
    pem += authority.ca.read_bytes()
    expected = [
        (cert.not_valid_before_utc.timestamp(), cert.not_valid_after_utc.timestamp())
        for cert in x509.load_pem_x509_certificates(pem)
    ]
    assert validities(pem) == expected
    assert len(expected) == 4


def test_half_a_certificate_is_none(tmp_path: Path):
    pem = Authority(tmp_path).ca.read_bytes()
    lines = pem.splitlines(keepends=True)
    with pytest.raises(ValueError, match="certificate"):
        validities(b"".join([lines[0], lines[1], lines[-1]]))


@pytest.mark.parametrize(
    ("begin", "end", "event"),
    [
        (-10 * DAY, -DAY, "certificate_expired"),
        (DAY, 10 * DAY, "certificate_not_yet_valid"),
        (-95 * DAY, 5 * DAY, "certificate_expires_soon"),
        (-85 * DAY, 15 * DAY, None),
        (-DAY / 2, DAY / 2, None),  # short-lived ones are not always about to expire
    ],
)
def test_a_warning_tells_what_is_wrong_with_a_certificates_dates(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    begin: timedelta,
    end: timedelta,
    event: str | None,
):
    caplog.set_level(logging.INFO)
    authority = Authority(tmp_path)
    dates = {"not_before": NOW + begin, "not_after": NOW + end}
    files = authority.issue("server", "a.test", **dates)
    watched = WatchedTls("tls_cert", files, cert="tls_cert", ca="tls_client_ca")
    said = [(line.message, vars(line)["setting"], line.levelname) for line in caplog.records]
    assert said == ([] if event is None else [(event, "tls_cert", "WARNING")])
    assert first_to_expire()["tls_cert"].end == (NOW + end).timestamp()

    files = authority.issue("server", "a.test", not_before=NOW - DAY, not_after=NOW + 99 * DAY)
    caplog.clear()
    watched.value()
    assert [line.message for line in caplog.records] == ["files_reloaded"]
    assert first_to_expire()["tls_cert"].end == (NOW + 99 * DAY).timestamp()
