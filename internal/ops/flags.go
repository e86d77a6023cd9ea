package ops

import (
	"slices"
	"strings"
	"time"
)

// OneOf returns an error for wrong usage unless the value of a flag is one of those allowed.
func OneOf(flag, value string, allowed ...string) error {
	switch {
	case slices.Contains(allowed, value):
		return nil
	case len(allowed) == 2:
		return Usagef("--%s: %q is neither %s nor %s", flag, value, allowed[0], allowed[1])
	default:
		return Usagef("--%s: %q is none of %s", flag, value, strings.Join(allowed, ", "))
	}
}

// NotNegative returns an error for wrong usage if the value of a flag is negative.
func NotNegative(flag string, value time.Duration) error {
	if value < 0 {
		return Usagef("--%s: %s is negative", flag, value)
	}
	return nil
}
