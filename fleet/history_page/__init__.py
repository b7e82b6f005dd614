"""The page over months: racks, figures, drivers, and what fails or drifts."""
