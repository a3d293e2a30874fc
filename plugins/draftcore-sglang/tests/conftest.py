"""What the tests of both captures share."""
