"""What executors say when they were told different things names every thing that can differ."""

import pytest

from executor.step_told import describe_told
from protos.executor.v1 import executor_pb2 as pb

FIELDS = pb.StepAgreement.DESCRIPTOR.fields_by_name


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_of_the_agreement_is_told(name: str):
    request = pb.StepRequest(step_id=7)
    before = describe_told(request)
    field = getattr(request.agreement, name)
    if FIELDS[name].is_repeated:
        field.append(1)
    else:
        setattr(request.agreement, name, 1)
    assert name in describe_told(request)
    assert describe_told(request) != before
