package migrate

import (
	"strings"
	"testing"
)

// FuzzMigrate checks that whatever a file with MetalLB's objects holds is converted, or refused.
func FuzzMigrate(f *testing.F) {
	f.Add("apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a, namespace: m}\n" +
		"spec: {addresses: [192.0.2.0/24]}\n---\nkind: BGPPeer\nmetadata: {name: b}\nspec: {myASN: 1, peerASN: 2}\n")
	f.Add(`{"kind":"List","items":[{"kind":"Service","metadata":{"name":"a"},"status":{"loadBalancer":{}}}]}`)
	f.Add("kind: CommunityList\nitems: [null, {spec: []}]\n")
	f.Fuzz(func(t *testing.T, text string) {
		objects, err := Decode(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, o := range Convert(objects).Objects {
			if o.Kind == "" || o.Spec == nil {
				t.Errorf("an object without a kind or a specification: %+v", o)
			}
		}
	})
}
