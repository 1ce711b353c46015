"""What tests of attention need: a dense oracle, masks to try and checks of compiled programs."""
