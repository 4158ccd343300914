"""Problems, plans and schedules, and the simulator of their memory."""
