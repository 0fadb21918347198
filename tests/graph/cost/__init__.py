"""Operations and bytes."""
