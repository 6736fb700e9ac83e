"""What papers are composed of besides schedules and densities."""
