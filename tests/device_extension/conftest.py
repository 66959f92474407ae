from tests.survival.conftest import bench, references

__all__ = ["bench", "references"]  # fixtures
