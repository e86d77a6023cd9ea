package e2e

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	"github.com/landfall-lb/landfall/e2e/lab"
)

// speakerView is what a speaker's /v1/status says of the cluster and of each VIP.
type speakerView struct {
	Members struct {
		Live []string `json:"live"`
	} `json:"members"`
	VIPs []struct {
		VIP   netip.Addr `json:"vip"`
		Nodes []struct {
			Node   string `json:"node"`
			Reason string `json:"reason"`
		} `json:"nodes"`
	} `json:"vips"`
}

func viewOf(t testing.TB, l *lab.Lab, node string) (view speakerView, err error) {
	t.Helper()
	text, err := l.Agent("speaker", node).Get(t.Context(), "/v1/status")
	if err == nil {
		err = json.Unmarshal([]byte(text), &view)
	}
	return view, err
}

// liveMembers returns how many live nodes a speaker sees, itself included.
func liveMembers(t testing.TB, l *lab.Lab, node string) int {
	t.Helper()
	view, err := viewOf(t, l, node)
	if err != nil {
		return 0
	}
	return len(view.Members.Live)
}

// wantReason waits until a node says of itself why it does or does not announce a VIP.
func wantReason(t testing.TB, l *lab.Lab, node string, vip netip.Addr, reason string) {
	t.Helper()
	eventually(t, fmt.Sprintf("%s says %s of %s", node, reason, vip), func() error {
		view, err := viewOf(t, l, node)
		if err != nil {
			return err
		}
		for _, v := range view.VIPs {
			for _, n := range v.Nodes {
				if v.VIP == vip && n.Node == node {
					if n.Reason == reason {
						return nil
					}
					return fmt.Errorf("it says %s", n.Reason)
				}
			}
		}
		return fmt.Errorf("it says nothing of it")
	})
}
