package plan

import "fmt"

// OnConflict says what to do with a VIP that a conflicting host uses before Landfall has ever
// announced it.
type OnConflict string

// The choices.
const (
	RefuseOnConflict   OnConflict = "refuse"   // it is not announced
	AnnounceOnConflict OnConflict = "announce" // it is announced all the same
	// ServiceOnConflict leaves it to the Service, whose owner can then take the address from the host. It is
	// no choice of a Service.
	ServiceOnConflict OnConflict = "service"
)

// ParseConflictPolicy reads what an administrator chooses.
func ParseConflictPolicy(s string) (OnConflict, error) {
	if c := OnConflict(s); c == ServiceOnConflict {
		return c, nil
	}
	c, err := ParseOnConflict(s)
	if err != nil {
		err = fmt.Errorf("%.80q is neither refuse nor announce nor service", s)
	}
	return c, err
}

// ParseOnConflict reads what a Service chooses; "" stands for refuse.
func ParseOnConflict(s string) (OnConflict, error) {
	switch c := OnConflict(s); c {
	case "":
		return RefuseOnConflict, nil
	case RefuseOnConflict, AnnounceOnConflict:
		return c, nil
	}
	return RefuseOnConflict, fmt.Errorf("%.80q is neither refuse nor announce", s)
}

// ConflictingHost is a device that uses a VIP although it is not a node with a speaker.
type ConflictingHost struct {
	Interface string `json:"interface"` // the node's, on which it was seen
	MAC       string `json:"mac"`
}

// String returns "02:00:00:00:00:09 on eth0".
func (h ConflictingHost) String() string { return h.MAC + " on " + h.Interface }
