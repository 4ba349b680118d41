"""Dates of certificates, read from their DER as far as it takes: RFC 5280, 4.1."""

import base64
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

log = logging.getLogger(__name__)

LAST_SHARE = 0.1  # of a certificate's time, in which it should have been replaced
_PEM = re.compile(b"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _GENERALIZED_TIME = 0xA0, 0x18  # tags of ASN.1
_VALIDITY = 3  # behind serial number, signature and issuer


class Validity(NamedTuple):
    """From when until when a certificate is valid, in seconds since 1970."""

    begin: float
    end: float


def validities(pem: bytes) -> list[Validity]:
    """Returns the validity of each certificate of a file, in order.

    Raises:
        ValueError: One is none.
    """
    try:
        return [_validity(base64.b64decode(text)) for text in _PEM.findall(pem)]
    except IndexError as error:
        raise ValueError("a certificate is cut off") from error


def warn_of_dates(setting: str, pem: bytes, now: float) -> None:
    """Logs a warning for each certificate that is not valid now, or not for long.

    Args:
        setting: That names the file.
        pem: Its content.
        now: Seconds since 1970.
    """
    for begin, end in validities(pem):
        dates = {"setting": setting, "begins": _iso(begin), "expires": _iso(end)}
        if now < begin:
            log.warning("certificate_not_yet_valid", extra=dates)
        elif now > end:
            log.warning("certificate_expired", extra=dates)
        elif end - now < LAST_SHARE * (end - begin):
            log.warning("certificate_expires_soon", extra=dates)


def _validity(certificate: bytes) -> Validity:
    [(_, content)] = _elements(certificate)
    _, to_be_signed = next(_elements(content))
    fields = [field for tag, field in _elements(to_be_signed) if tag != _VERSION]
    begin, end = [_seconds(tag, text) for tag, text in _elements(fields[_VALIDITY])]
    return Validity(begin, end)


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields tag and content of DER values, one behind another."""
    at = 0
    while at < len(data):
        tag, length, at = data[at], data[at + 1], at + 2
        if length & 0x80:
            num_bytes = length & 0x7F
            length, at = int.from_bytes(data[at : at + num_bytes], "big"), at + num_bytes
        yield tag, data[at : at + length]
        at += length


def _seconds(tag: int, text: bytes) -> float:
    form = "%Y%m%d%H%M%SZ" if tag == _GENERALIZED_TIME else "%y%m%d%H%M%SZ"
    return datetime.strptime(text.decode(), form).replace(tzinfo=UTC).timestamp()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
