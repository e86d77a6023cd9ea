package plan

import "fmt"

// TooLarge says that a Service needs more of the kernel than one Service may.
type TooLarge struct{ Elements, Limit int }

// Error implements error.
func (e TooLarge) Error() string {
	return fmt.Sprintf("its ports, addresses, endpoints and source ranges need up to %d elements of the kernel's sets, "+
		"more than the %d that one Service may have; what was programmed before stays", e.Elements, e.Limit)
}
