"""Router: takes requests, schedules every rank, drives the executors. Policy, no tensors."""
