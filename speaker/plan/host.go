package plan

import "fmt"

// OnConflict says what to do with a VIP that a conflicting host uses before Landfall has ever
// announced it.
type OnConflict string

// The choices.
const (
	RefuseOnConflict   OnConflict = "refuse"   // it is not announced
	AnnounceOnConflict OnConflict = "announce" // it is announced all the same
)

// ParseOnConflict reads a choice; "" stands for refuse.
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
