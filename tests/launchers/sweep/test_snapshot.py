"""What a job imports is executed as the user, so stored code is compared before it is used again."""

import pytest

from inpaint_bench.core.errors import UserError
from launchers.sweep import snapshot


@pytest.mark.subprocess
def test_only_the_user_can_enter_the_code_of_a_sweep(tmp_path):
    (tmp_path / "code").mkdir(mode=0o775)
    snapshot.take(tmp_path / "code")
    assert (tmp_path / "code").stat().st_mode & 0o077 == 0


@pytest.mark.subprocess
@pytest.mark.parametrize("name", ["launchers/entry.py", "torch.py"])
def test_changed_code_is_refused(name, tmp_path):
    code = snapshot.take(tmp_path / "code")
    assert snapshot.take(tmp_path / "code") == code
    with (code / name).open("a") as file:
        file.write("# evil")
    with pytest.raises(UserError, match="its content does not match its name"):
        snapshot.take(tmp_path / "code")
