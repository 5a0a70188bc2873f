"""Define an app that needs a package that does not exist."""

import a_package_that_does_not_exist  # noqa: F401
