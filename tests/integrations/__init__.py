import pytest

pytest.register_assert_rewrite("integrations.contract")
