"""Everything that draws: tables, pages, figures, the terminal."""
