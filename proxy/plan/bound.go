package plan

import "fmt"

// TooLarge says that a Service needs more of the kernel than one Service may.
type TooLarge struct {
	Elements, Limit int
	// Rules is set where rules are counted, and not elements of sets.
	Rules bool
}

// Error implements error.
func (e TooLarge) Error() string {
	counted := "elements of the kernel's sets"
	if e.Rules {
		counted = "rules"
	}
	return fmt.Sprintf("its ports, addresses, endpoints and source ranges need up to %d %s, "+
		"more than the %d that one Service may have; what was programmed before stays", e.Elements, counted, e.Limit)
}
