"""What the bodies of several APIs share."""
