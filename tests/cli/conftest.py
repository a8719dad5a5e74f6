from tests.launchers.conftest import fake_command

__all__ = ["fake_command"]
