package plan

import (
	"encoding/json"
	"fmt"
	"strings"
)

// PeerNames is a list of the names of BGP peers, in a form that can be compared: two lists are
// equal if they name the same peers in the same order. The zero value is the empty list.
type PeerNames string

// peerSeparator occurs in no name of a Kubernetes object.
const peerSeparator = "\n"

// MaxPeerNames is how many bytes a list has at most, which is room for 16 of the longest names.
// Speakers read no longer one from one another.
const MaxPeerNames = 4096

// NewPeerNames returns the list of these names, or of the first of them if all would be too long.
func NewPeerNames(names ...string) PeerNames {
	size := -len(peerSeparator)
	for i, name := range names {
		if size += len(peerSeparator) + len(name); size > MaxPeerNames {
			names = names[:i]
			break
		}
	}
	return PeerNames(strings.Join(names, peerSeparator))
}

// List returns the names; nil if there are none.
func (p PeerNames) List() []string {
	if p == "" {
		return nil
	}
	return strings.Split(string(p), peerSeparator)
}

// String returns the names for a message.
func (p PeerNames) String() string { return strings.Join(p.List(), ", ") }

// MarshalJSON writes the names as a list.
func (p PeerNames) MarshalJSON() ([]byte, error) { return json.Marshal(p.List()) }

// UnmarshalJSON reads a list of names. It refuses those that no object can have, as they would be read as others.
func (p *PeerNames) UnmarshalJSON(b []byte) error {
	var names []string
	if err := json.Unmarshal(b, &names); err != nil {
		return err
	}
	for _, name := range names {
		if name == "" || strings.Contains(name, peerSeparator) {
			return fmt.Errorf("%.80q is not the name of a BGPPeer", name)
		}
	}
	*p = PeerNames(strings.Join(names, peerSeparator))
	return nil
}
