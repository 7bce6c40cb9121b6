"""A simulated accelerator as a third party would ship one: nothing of rlcore but its public names is used."""
