"""Parts of bodies that several APIs share."""
