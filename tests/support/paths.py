"""Paths of the repository that tests of several packages read."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL, DEMO_DRAFTS = ROOT / "deploy/demo_model", ROOT / "deploy/demo_drafts"
DEMO_MODEL_MLA = ROOT / "deploy/demo_model_mla"
